"""The one exception for mistakes of the user: its message is printed, the exit code is 2."""


class UserError(ValueError):
    """What was given, what is needed and what to do, in one message without a traceback."""

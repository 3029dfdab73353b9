"""The one exception for mistakes of the user: the command line prints its message and exits with code 2."""


class UserError(ValueError):
    """What was given, what is needed and what to do about it, in one message without a traceback."""

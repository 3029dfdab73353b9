"""Shared by every command line: a user's mistake ends with one message and exit code 2."""

import os
import sys
from collections.abc import Callable

from jaxseek.errors import UserError

_PIPE_CLOSED = 141  # what a shell reports of a program that SIGPIPE has ended


def run_main(main: Callable[[], int | None], *, program: str) -> int:
    """Call `main`; return its exit code (`None` is 0), or 2 after printing a `UserError` on stderr.
    Ctrl-C gives 130, a reader that has enough (`... | head`) 141; other exceptions pass.

    Use as `sys.exit(run_main(main, program="jaxseek.train"))`.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return _PIPE_CLOSED

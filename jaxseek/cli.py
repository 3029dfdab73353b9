"""Shared by every command line: a user's mistake ends with one message and exit code 2."""

import sys
from collections.abc import Callable

from jaxseek.errors import UserError


def run_main(main: Callable[[], None], *, program: str) -> int:
    """Call `main`; return 0, or 2 after printing a `UserError` on stderr. Other exceptions pass.

    Use as `sys.exit(run_main(main, program="jaxseek.train"))`.
    """
    try:
        main()
    except UserError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    return 0

"""Shared by every command line: a user's mistake ends with one message and exit code 2."""

import sys
from collections.abc import Callable

from jaxseek.errors import UserError


def run_main(main: Callable[[], int | None], *, program: str) -> int:
    """Call `main`; return its exit code (`None` is 0), or 2 after printing a `UserError` on stderr.
    Ctrl-C gives 130; other exceptions pass.

    Use as `sys.exit(run_main(main, program="jaxseek.train"))`.
    """
    try:
        return main() or 0
    except UserError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130

"""Where jaxseek finds the files that come with it, and keeps those it makes for itself."""

import os
from pathlib import Path


def configs_dir() -> Path:
    """The folder of `models/*.yaml` and `runs/*.yaml`.

    It is `configs/` of the checkout, or in an installed wheel the copy inside the package.
    """
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def cache_dir() -> Path:
    """Where trained tokenizers, encoded text and compiled programs are kept between runs.

    `$JAXSEEK_CACHE`, or `~/.cache/jaxseek`; it need not exist.
    """
    return Path(os.environ.get("JAXSEEK_CACHE") or "~/.cache/jaxseek").expanduser()

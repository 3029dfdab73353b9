"""Where jaxseek finds the files that come with it, and keeps those that it makes."""

import os
from pathlib import Path

# The folders inside a run folder, and inside a converted model's.
CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"
HF_FILES = "hf"  # files of the Hugging Face folder that the model came from, for the way back


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

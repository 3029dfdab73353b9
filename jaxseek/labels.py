"""The one label that data and loss must agree on."""

IGNORE_LABEL = -100  # a position that is not predicted; torch's and HF's value

"""The reference is installed on Python 3.11 only (pyproject.toml says why)."""

import sys

collect_ignore_glob = ["test_*.py"] if sys.version_info >= (3, 12) else []

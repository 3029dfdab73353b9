"""The process the tests run in: six emulated CPU devices, no network, caches of its own.

All of it is set before JAX is imported: JAX looks at the environment once.
"""

import os
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=6"
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAXSEEK_CACHE", str(TESTS.parent / ".pytest_cache" / "jaxseek"))

from jaxseek import compilation_cache  # noqa: E402 - imports JAX

compilation_cache.enable(Path(os.environ["JAXSEEK_CACHE"]) / "jax")

# PyTorch, the oracle of the parity tests, is installed on Python 3.11 only; pyproject.toml says
# why. On later Pythons the files that name it are not collected.
collect_ignore = [
    str(path)
    for path in TESTS.rglob("test_*.py")
    if sys.version_info >= (3, 12) and re.search(r"\btorch\b", path.read_text("utf-8"))
]

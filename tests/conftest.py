"""The process the tests run in: six emulated CPU devices, no network, caches of its own.

All of it is set before JAX is imported: JAX looks at the environment once.
"""

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]

# Tests compile much and run little: without LLVM's costly passes a train step compiles in a third
# of the time.
_FLAGS = (
    "--xla_force_host_platform_device_count=6",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS)).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAXSEEK_CACHE", str(CHECKOUT / ".pytest_cache" / "jaxseek"))

from jaxseek import compilation_cache  # noqa: E402 - imports JAX

compilation_cache.enable(Path(os.environ["JAXSEEK_CACHE"]) / "jax")

# PyTorch, the oracle of the parity tests, is on Python 3.11 only: see pyproject.toml.
collect_ignore = ["parity"] if sys.version_info >= (3, 12) else []

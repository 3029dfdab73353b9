"""JAX's persistent compilation cache: a program that ran here before starts without compiling."""

from pathlib import Path

import jax

# Reading an entry takes milliseconds too: programs that compile faster only fill the disk.
MIN_COMPILE_SECONDS = 0.1


def enable(directory: Path) -> None:
    """Keep compiled programs in `directory`; it need not exist.

    Call it before the first compilation: JAX looks only once. Machines may share the folder, since
    JAX's keys hold its version, the XLA flags and the processor's instruction set. Where the folder
    cannot be written or an entry cannot be read, JAX warns and compiles: the cache stops no run.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)

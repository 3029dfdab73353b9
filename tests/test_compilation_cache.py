"""The compilation cache works from process to process."""

import subprocess
import sys

COMPILE_AND_COUNT_HITS = """
import sys, pathlib, jax, jax.numpy as jnp
from jaxseek import compilation_cache
compilation_cache.MIN_COMPILE_SECONDS = 0.0
compilation_cache.enable(pathlib.Path(sys.argv[1]))
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))
print(events.count("/jax/compilation_cache/cache_hits"))
"""


def cache_hits(directory) -> int:
    command = [sys.executable, "-W", "error", "-c", COMPILE_AND_COUNT_HITS, str(directory)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stderr == ""
    return int(run.stdout)


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    directory = tmp_path / "not" / "there yet"
    assert cache_hits(directory) == 0
    assert cache_hits(directory) >= 1

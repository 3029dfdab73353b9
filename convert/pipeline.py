"""Many small jobs on a few threads, with a bound on the bytes that are in memory at a time."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from convert import interruption

# File system and checksums run outside the GIL. More threads than cores get in each other's way in
# the page cache, and more than four only wait for the disk.
_THREADS = min(4, os.cpu_count() or 1)
# Above it a job waits for earlier ones; one that is larger runs alone.
_BYTES_IN_FLIGHT = 192 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Something to do that holds `nbytes` in memory while it runs."""

    run: Callable[[], None]
    nbytes: int


def run_all(jobs: Iterable[Job], *, done: Callable[[int], None]) -> None:
    """Run the jobs, begun in their order; `done(nbytes)` is called after each, on this thread.

    Raises:
        the first error of a job; jobs not yet begun are left out then.
    """
    running: collections.deque[tuple[Job, Future[None]]] = collections.deque()
    in_flight = 0
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="convert") as pool:
        try:
            for job in jobs:
                interruption.check()
                while running and in_flight + job.nbytes > _BYTES_IN_FLIGHT:
                    in_flight -= _finish(running, done)
                running.append((job, pool.submit(job.run)))
                in_flight += job.nbytes
            while running:
                _finish(running, done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _finish(running: collections.deque[tuple[Job, Future[None]]], done: Callable) -> int:
    job, future = running.popleft()
    future.result()
    done(job.nbytes)
    return job.nbytes

import threading
import time

import pytest

from convert import pipeline
from convert.pipeline import Job, run_all


def test_jobs_never_hold_more_than_the_bound_unless_one_alone_does(monkeypatch):
    monkeypatch.setattr(pipeline, "_BYTES_IN_FLIGHT", 10)
    lock = threading.Lock()
    held, most = 0, []

    def job(nbytes: int) -> Job:
        def run():
            nonlocal held
            with lock:
                held += nbytes
                most.append((held, nbytes))
            time.sleep(0.002)
            with lock:
                held -= nbytes

        return Job(run=run, nbytes=nbytes)

    sizes = [4, 3, 9, 1, 25, 2, 2, 2, 8, 10, 1]
    done = []
    run_all(map(job, sizes), done=done.append)
    assert done == sizes
    assert len(most) == len(sizes)
    assert all(together <= 10 or together == alone for together, alone in most)


def test_the_first_error_ends_it_and_later_jobs_are_not_begun():
    begun = []

    def fail():
        raise ValueError("third")

    def jobs():
        for number in range(1000):
            begun.append(number)
            yield Job(run=fail if number == 2 else lambda: None, nbytes=pipeline._BYTES_IN_FLIGHT)

    with pytest.raises(ValueError, match="third"):
        run_all(jobs(), done=lambda nbytes: None)
    assert len(begun) < 10

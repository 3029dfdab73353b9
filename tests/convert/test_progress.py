import pytest

from convert.progress import Progress, Summary, count_dtypes, human_bytes, peak_memory


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (13_481_025_536, "13.5 GB"),
        (1.3e12, "1.30 TB"),
    ],
)
def test_bytes_are_written_for_people(nbytes, text):
    assert human_bytes(nbytes) == text


def test_a_summary_counts_by_dtype_and_says_rate_memory_and_notes(capsys):
    tensors = [("BF16", 10, 20), ("F32", 3, 12), ("BF16", 5, 10)]
    assert count_dtypes(tensors) == {"BF16": (2, 15, 30), "F32": (1, 3, 12)}
    summary = Summary(
        dtypes=count_dtypes(tensors), read=4 * 10**9, written=42, seconds=2.0, notes=("a note",)
    )
    summary.print()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in lines if line.startswith(("BF16", "F32", "in all"))] == [
        ["BF16", "2", "15", "30", "B"],
        ["F32", "1", "3", "12", "B"],
        ["in", "all", "3", "18", "42", "B"],
    ]
    assert lines[-2].startswith("read 4.0 GB, wrote 42 B in 2.0 s (2.00 GB/s); peak memory ")
    assert lines[-1] == "a note"


def test_progress_counts_bytes_and_seconds_without_a_terminal(capsys):
    with Progress("to-jax", total=10) as progress:
        progress.advance(4)
        progress.advance(6)
    assert progress.done == 10
    assert progress.seconds > 0
    assert capsys.readouterr() == ("", "")


def test_peak_memory_is_at_least_what_is_held():
    held = bytearray(50 << 20)
    assert peak_memory() > len(held)

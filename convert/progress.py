"""What a person sees of a conversion: a bar in bytes while it runs, a table at its end."""

import collections
import dataclasses
import io
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from convert.files.tensor_info import TensorInfo


class Progress:
    """A bar on stderr where that is a terminal, else nothing; counts bytes and seconds.

    Args:
        label: what is done, such as `to-jax`.
        total: bytes in all.
    """

    def __init__(self, label: str, *, total: int):
        self.done = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = _make_bar()
            self._task = self._bar.add_task(label, total=total)
        self._started = time.perf_counter()
        self.seconds = 0.0

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.perf_counter() - self._started
        if self._bar:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        self.done += nbytes
        if self._bar:
            self._bar.advance(self._task, nbytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion did.

    Attributes:
        dtypes: tensors, values and bytes by dtype, as written.
        read, written: bytes.
        seconds: from the first byte to the last; start-up is not in it.
        notes: lines for the person.
    """

    dtypes: dict[str, tuple[int, int, int]]
    read: int
    written: int
    seconds: float
    notes: tuple[str, ...]

    def print(self) -> None:
        """Table and figures on stdout."""
        print_dtypes(self.dtypes)
        rate = self.read / self.seconds / 1e9 if self.seconds else 0.0
        print(
            f"read {human_bytes(self.read)}, wrote {human_bytes(self.written)} in "
            f"{self.seconds:.1f} s ({rate:.2f} GB/s); peak memory {human_bytes(peak_memory())}"
        )
        for note in self.notes:
            print(note)


def count_dtypes(tensors: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, int, int]]:
    """(dtype, values, bytes) of each tensor to (tensors, values, bytes) by dtype."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for dtype, size, nbytes in tensors:
        for i, more in enumerate((1, size, nbytes)):
            counts[dtype][i] += more
    ordered = sorted(counts.items(), key=lambda item: -item[1][2])
    return {dtype: (n, size, nbytes) for dtype, (n, size, nbytes) in ordered}


def info_dtypes(tensors: Iterable[TensorInfo]) -> dict[str, tuple[int, int, int]]:
    """`count_dtypes` of the tensors of a folder."""
    return count_dtypes((info.dtype, info.size, info.nbytes) for info in tensors)


def print_dtypes(dtypes: dict[str, tuple[int, int, int]]) -> None:
    """The table of dtypes on stdout, with a total where there are several."""
    rows = dict(dtypes)
    if len(rows) > 1:
        n, size, nbytes = (sum(column) for column in zip(*dtypes.values(), strict=True))
        rows["in all"] = (n, size, nbytes)
    print_table(
        ("dtype", "tensors", "values", "size"),
        [(dtype, f"{n:,}", f"{size:,}", human_bytes(b)) for dtype, (n, size, b) in rows.items()],
    )


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None
) -> None:
    """A table on stdout whose first column is a name and whose others are numbers.

    Args:
        width: in characters, instead of that of the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()  # to stdout, a Console ends the process itself where nobody reads on
    styled = sys.stdout.isatty()
    Console(file=text, force_terminal=styled, highlight=False, width=width).print(table)
    print(text.getvalue(), end="")


def human_bytes(nbytes: float) -> str:
    """`13.5 GB`, in powers of 1000, as disks and downloads are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    try:  # Linux's ru_maxrss begins with that of the process which started this one
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))

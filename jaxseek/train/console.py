"""What a person sees of a run: a header, a live progress bar, a summary. Where the output is no
terminal, plain lines.
"""

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_LINES = 20  # progress lines of a run whose output is no terminal


class RunProgress:
    """A progress bar over `steps` optimizer steps; use it in a `with` block."""

    def __init__(self, console: Console, *, first: int, steps: int):
        self._console = console
        self._steps = steps
        self._every = max(1, (steps - first) // _PLAIN_LINES)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=first, status="")

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, *, step: int, loss: float, tokens_per_second: float, seconds: float) -> None:
        """Show the state after `step`."""
        status = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._every == 0 or step == self._steps):
            left = datetime_text((self._steps - step) * seconds)
            self._console.print(f"step {step}/{self._steps}  {status}  ETA {left}", highlight=False)


def datetime_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf

"""What `python -m jaxseek.plan --probe` measured, as a file for later plans. No JAX in here."""

import dataclasses
import json
import math
import re
from pathlib import Path

from jaxseek.data.cache import atomic_write
from jaxseek.errors import UserError
from jaxseek.paths import cache_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Rates of one machine's devices, all of them busy at once.

    Attributes:
        device_kind: JAX's name of the device, for GPUs nvidia-smi's too.
        count: number of devices.
        date: of the measurement, `2026-01-31`.
        jax: its version.
        matmul: bf16 operations of one device a second, by shape `MxKxN`.
        matmul_flops: the same over all shapes: their operations by their time.
        memory: bytes a second from and to one device's memory.
        all_reduce: bytes that one device sends a second in the ring's count, by the bytes that it
            puts in; empty for one device.
    """

    device_kind: str
    count: int
    date: str
    jax: str
    matmul: dict[str, float]
    matmul_flops: float
    memory: float
    all_reduce: dict[str, float]

    def __post_init__(self):
        for name in ("device_kind", "date", "jax"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is no text")
        if type(self.count) is not int or self.count < 1:
            raise ValueError("count is no number of devices")
        for name in ("matmul", "all_reduce"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is no table")
        rates = [self.matmul_flops, self.memory, *self.matmul.values(), *self.all_reduce.values()]
        for rate in rates:
            if not isinstance(rate, int | float) or not (rate > 0 and math.isfinite(rate)):
                raise ValueError(f"{rate!r} is no rate")
        if bool(self.all_reduce) != (self.count > 1):
            raise ValueError(f"all_reduce does not go with {self.count} devices")
        if not all(size.isdecimal() for size in self.all_reduce):
            raise ValueError("a key of all_reduce is no number of bytes")

    @property
    def wire(self) -> float | None:
        """Bytes a second that one device sends, of the largest transfer, where start-up times count
        least; `None` for one device.
        """
        return self.all_reduce[max(self.all_reduce, key=int)] if self.all_reduce else None


def measurement_path(device_kind: str, *, count: int) -> Path:
    """Where the measurement of so many devices of a kind is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return cache_dir() / "probes" / f"{count}x{name}.json"


def load_measurement(device_kind: str, *, count: int) -> Measurement | None:
    """What was measured on so many devices of a kind, or `None`.

    Raises:
        UserError: for a file that is damaged or cannot be read.
    """
    path = measurement_path(device_kind, count=count)
    try:
        found = Measurement(**json.loads(path.read_text(encoding="utf-8")))
        if (found.device_kind, found.count) != (device_kind, count):
            raise ValueError(f"it is of {found.count} x {found.device_kind}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}, written by --probe, is damaged ({error}). Delete it; to measure again, run "
            "python -m jaxseek.plan --probe."
        ) from error
    return found


def save_measurement(measurement: Measurement) -> Path:
    """Keep `measurement` in place of an older one; a reader sees either, never half. The path.

    Raises:
        UserError: where the folder cannot be written.
    """
    path = measurement_path(measurement.device_kind, count=measurement.count)
    with atomic_write(path, what="the measurement") as temporary:
        temporary.write_text(
            json.dumps(dataclasses.asdict(measurement), indent=2) + "\n", encoding="utf-8"
        )
    return path

"""`--mesh 3x1` to a device mesh: parsing, emulated CPU devices, what to say where the devices are
not there.

Nothing here imports JAX before it must: the command line checks a mesh before JAX starts, and
emulated devices can only be asked for before JAX starts.
"""

import dataclasses
import os
import re
import sys
from typing import TYPE_CHECKING

from jaxseek.errors import UserError

if TYPE_CHECKING:
    import jax

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"
_EMULATION_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each mesh axis: the batch is split over `data`, the weights of a layer over
    `tensor`.
    """

    data: int
    tensor: int

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """`"3x1"` is 3 data x 1 tensor devices.

        Raises:
            UserError: when `text` is anything but two positive integers joined by an x.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
        if not match:
            raise UserError(
                f"mesh: {text!r} is not of the form AxB (data devices x tensor devices), for "
                "example 3x1."
            )
        return cls(data=int(match[1]), tensor=int(match[2]))

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"


def emulate_devices(count: int) -> None:
    """Let JAX's CPU platform show `count` devices. Only possible before JAX's backends start.

    Raises:
        UserError: when JAX runs already with fewer devices, so that the request would be ignored
            without a word.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _EMULATION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_EMULATION_FLAG}={count}".strip()
    if "jax" in sys.modules and sys.modules["jax"].device_count() < count:
        raise UserError(
            f"{count} emulated devices were asked for, but JAX shows "
            f"{sys.modules['jax'].device_count()}; "
            f"start Python with XLA_FLAGS={_EMULATION_FLAG}={count}."
        )


def emulated_devices() -> int:
    """How many devices `XLA_FLAGS` asks JAX's CPU platform to show; one where it does not."""
    found = re.search(rf"{_EMULATION_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[1]) if found else 1


def make_mesh(shape: MeshShape) -> "jax.sharding.Mesh":
    """A mesh of the first `shape.devices` devices with the axes `data` and `tensor`.

    Raises:
        UserError: when there are fewer devices; the message says which meshes are possible.
    """
    import jax

    devices = jax.devices()
    if len(devices) < shape.devices:
        raise UserError(
            f"--mesh {shape} needs {shape.devices} devices, but JAX sees {len(devices)} "
            f"({devices[0].device_kind}). Use --mesh {len(devices)}x1 or --mesh 1x{len(devices)}, "
            "or run on "
            f"emulated CPU devices with JAX_PLATFORMS=cpu."
        )
    return jax.make_mesh(
        (shape.data, shape.tensor),
        (DATA_AXIS, TENSOR_AXIS),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=devices[: shape.devices],
    )

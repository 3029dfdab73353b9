"""`python -m jaxseek.plan --probe`: what the devices of this machine really reach.

All devices work at once, as in training, where they share power, cooling and the host. Shapes:
M rows of tokens, K width of the input, N of the output.
"""

import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from jaxseek.errors import UserError
from jaxseek.plan.measurement import Measurement, save_measurement

Clock = Callable[[], float]

_AXIS = "device"
_MIB = 2**20
_REPEATS = 5
# What a sample should last: long enough for starting kernels not to count and for a GPU to settle
# on a clock.
_SAMPLE_SECONDS = 0.1
_MOST_CALLS = 64
# Of a device's memory, for one array: an input, its result and the one before live together.
_ARRAY_SHARE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured with.

    Attributes:
        matmuls: shapes (M, K, N).
        array_bytes: of each of the three arrays of the triad, on one device.
        all_reduce_bytes: what each device puts in.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    array_bytes: int
    all_reduce_bytes: tuple[int, ...]


# The products of a 7B model's layer on 16384 tokens; on CPU of one that a core is quick with.
GPU_SIZES = Sizes(
    matmuls=((16384, 4096, 4096), (16384, 4096, 11008), (16384, 11008, 4096)),
    array_bytes=512 * _MIB,
    all_reduce_bytes=tuple(size * _MIB for size in (1, 4, 16, 64, 256)),
)
CPU_SIZES = Sizes(
    matmuls=((256, 512, 512), (256, 512, 1408), (256, 1408, 512)),
    array_bytes=64 * _MIB,
    all_reduce_bytes=(1 * _MIB, 4 * _MIB, 16 * _MIB),
)


def probe_machine(*, as_json: bool) -> None:
    """Measure the devices that JAX shows, keep the result for later plans, and print it.

    Raises:
        UserError: where the devices are of several kinds, and where the result cannot be kept.
    """
    progress = Console(stderr=True, highlight=False)
    devices = jax.devices()
    platform = devices[0].platform
    progress.print(f"measuring {len(devices)} x {devices[0].device_kind}")
    measured = measure(devices, sizes=CPU_SIZES if platform == "cpu" else GPU_SIZES)
    path = save_measurement(measured)
    if as_json:
        print(json.dumps(dataclasses.asdict(measured), indent=2))
    else:
        console = Console(highlight=False)
        for line in describe(measured):
            console.print(line)
    progress.print(f"kept in {path}", soft_wrap=True, markup=False)
    if platform == "cpu":
        progress.print(
            "No GPU is here: these are figures of this machine's CPU. No plan for GPUs uses them.",
            soft_wrap=True,
        )


def describe(measured: Measurement) -> list[str]:
    """A measurement as a person reads it, a line each."""
    lines = [f"{measured.count} x {measured.device_kind}, JAX {measured.jax}, {measured.date}"]
    lines += [
        f"bf16 product {shape}: {flops / 1e12:.3g} TFLOP/s"
        for shape, flops in measured.matmul.items()
    ]
    lines.append(f"bf16 products together: {measured.matmul_flops / 1e12:.3g} TFLOP/s a device")
    lines.append(f"memory, read and written: {measured.memory / 1e9:.1f} GB/s a device")
    lines += [
        f"all-reduce of {int(size) / _MIB:g} MiB: {rate / 1e9:.2f} GB/s sent by a device"
        for size, rate in measured.all_reduce.items()
    ]
    return lines


def measure(
    devices: Sequence[Any], *, sizes: Sizes, clock: Clock = time.perf_counter
) -> Measurement:
    """Measure `devices` at once.

    Arrays are made smaller where `sizes` asks for more than an eighth of a device's memory.

    Raises:
        UserError: when they are of several kinds, whose mean would be nobody's rate.
    """
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise UserError(
            f"--probe measures devices of one kind, and JAX shows {' and '.join(kinds)}; choose "
            "with CUDA_VISIBLE_DEVICES."
        )
    mesh = jax.make_mesh(
        (len(devices),), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    limit = _array_limit(devices[0])
    flops = {shape: 2.0 * shape[0] * shape[1] * shape[2] for shape in sizes.matmuls}
    seconds = {shape: _matmul_seconds(mesh, shape, clock=clock) for shape in sizes.matmuls}
    return Measurement(
        device_kind=kinds[0],
        count=len(devices),
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        matmul={"x".join(map(str, shape)): flops[shape] / seconds[shape] for shape in seconds},
        matmul_flops=sum(flops.values()) / sum(seconds.values()),
        memory=_memory_rate(mesh, min(sizes.array_bytes, limit), clock=clock),
        all_reduce={
            str(size): _all_reduce_rate(mesh, size, clock=clock)
            for size in dict.fromkeys(min(size, limit) for size in sizes.all_reduce_bytes)
            if len(devices) > 1
        },
    )


def _matmul_seconds(mesh: jax.sharding.Mesh, shape: tuple[int, int, int], *, clock: Clock) -> float:
    """Seconds of a bf16 product with float32 sums, [M, K] x [K, N], on each device."""
    m, k, n = shape

    def product(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    x = _random(mesh, (m, k), jnp.bfloat16)
    w = _random(mesh, (k, n), jnp.bfloat16)
    return seconds_per_call(_on_every_device(product, mesh), x, w, clock=clock)


def _memory_rate(mesh: jax.sharding.Mesh, array_bytes: int, *, clock: Clock) -> float:
    """Bytes a second of the triad a = a + 2 b (STREAM, McCalpin 1995): two arrays read, one
    written in place, as the optimizer does.
    """
    size = (array_bytes // 4,)
    a, b = _random(mesh, size, jnp.float32), _random(mesh, size, jnp.float32)
    triad = _in_place(_on_every_device(lambda a, b: a + 2.0 * b, mesh, donate=(0,)), a)
    return 3 * 4 * size[0] / seconds_per_call(triad, b, clock=clock)


def _all_reduce_rate(mesh: jax.sharding.Mesh, operand_bytes: int, *, clock: Clock) -> float:
    """Bytes a second that one device sends in a ring: 2 (N - 1) / N of what it puts in, the count
    of `Collective.wire_bytes`. In place, for XLA copies an operand that it has to keep; the sums
    of sums overflow, which takes no longer.
    """
    # XLA's CPU compiler aborts on bf16 reductions.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16

    def psum(x):
        return jax.lax.pcast(jax.lax.psum(x, _AXIS), _AXIS, to="varying")

    x = _random(mesh, (operand_bytes // jnp.dtype(dtype).itemsize,), dtype)
    reduce = _in_place(_on_every_device(psum, mesh, donate=(0,)), x)
    # On few cores XLA's CPU backend deadlocks when the devices are in different programs.
    call = (lambda: jax.block_until_ready(reduce())) if on_cpu else reduce
    sent = 2 * operand_bytes * (mesh.size - 1) / mesh.size
    return sent / seconds_per_call(call, clock=clock)


def seconds_per_call(function: Callable[..., Any], *arguments: Any, clock: Clock) -> float:
    """Median seconds of one call, after a first one that compiles and a second that warms up.

    A sample is as many calls, started one after the other and waited for together, as take long
    enough to be measured.
    """
    jax.block_until_ready(function(*arguments))
    alone = _sample(function, *arguments, calls=1, clock=clock)
    calls = min(_MOST_CALLS, max(1, round(_SAMPLE_SECONDS / max(alone, 1e-9))))
    samples = [_sample(function, *arguments, calls=calls, clock=clock) for _ in range(_REPEATS)]
    return statistics.median(samples)


def _sample(function: Callable[..., Any], *arguments: Any, calls: int, clock: Clock) -> float:
    started = clock()
    result = None
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (clock() - started) / calls


def _on_every_device(
    function: Callable[..., Any], mesh: jax.sharding.Mesh, *, donate: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` of one device's blocks as a compiled program for all of them."""
    spec = PartitionSpec(_AXIS)
    on_all = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(on_all, donate_argnums=donate)


def _in_place(function: Callable[..., jax.Array], x: jax.Array) -> Callable[..., jax.Array]:
    """`function`, which takes over its first argument's memory, on `x` and then on each result."""

    def call(*rest: jax.Array) -> jax.Array:
        nonlocal x
        x = function(x, *rest)
        return x

    return call


def _random(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of which every device holds a block of `shape`, made there. Normally distributed:
    multiplying equal numbers takes less power, so that a GPU would show a clock it cannot keep.
    """
    rows, *rest = shape
    whole = (rows * mesh.size, *rest)
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    make = jax.jit(lambda key: jax.random.normal(key, whole, dtype), out_shardings=sharding)
    return make(jax.random.key(0))


def _array_limit(device: Any) -> int:
    """Bytes that one array may take on a device, whole MiB; no limit where JAX knows of none."""
    total = (device.memory_stats() or {}).get("bytes_limit")
    return sys.maxsize if total is None else max(1, total // _ARRAY_SHARE // _MIB) * _MIB

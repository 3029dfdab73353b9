import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxseek.checkpoint import CheckpointStore
from jaxseek.checkpoint_arrays import (
    chunk_file,
    create_raw_array,
    open_array,
    read_sharded,
    read_slice,
    write_orbax_metadata,
)

ROOT = Path(__file__).parents[1]
NAME = "params.blocks.kernel"


def bits(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).tolist()


def random_array(shape, dtype=jnp.bfloat16):
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(0).bytes(size), dtype).reshape(shape)


def write_raw(folder, name, array, *, chunk, order):
    """Writes an array as a converter does: its header, then every chunk's bytes."""
    create_raw_array(folder, name, shape=array.shape, dtype=array.dtype, chunk=chunk, order=order)
    grid = [-(-size // length) for size, length in zip(array.shape, chunk, strict=True)]
    for index in np.ndindex(*grid):
        whole = np.zeros(chunk, array.dtype)
        part = array[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunk, strict=True))]
        whole[tuple(slice(n) for n in part.shape)] = part
        path = chunk_file(folder, name, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole.transpose(order).tobytes())


@pytest.mark.parametrize(
    ("shape", "chunk", "order", "dtype"),
    [
        ((3, 4, 5), (1, 4, 5), (0, 2, 1), jnp.bfloat16),
        ((2, 3, 4, 5), (1, 1, 4, 5), (0, 1, 3, 2), jnp.float32),
        ((3, 4, 5), (2, 3, 5), (2, 0, 1), jnp.float16),  # Nothing divides.
        ((7,), (7,), (0,), jnp.float8_e4m3fn),
        ((), (), (), jnp.int32),
    ],
)
def test_tensorstore_and_orbax_read_a_raw_array(tmp_path, shape, chunk, order, dtype):
    array = random_array(shape, dtype)
    write_raw(tmp_path, NAME, array, chunk=chunk, order=order)
    stored = open_array(tmp_path, NAME)
    assert (stored.shape, stored.dtype.numpy_dtype) == (shape, dtype)
    assert bits(stored.read().result()) == bits(array)
    write_orbax_metadata(tmp_path, [NAME])
    (restored,) = ocp.PyTreeCheckpointer().restore(tmp_path).items()
    assert restored[0] == NAME
    assert (restored[1].shape, restored[1].dtype) == (shape, dtype)
    assert bits(restored[1]) == bits(array)


def test_tensorstore_writes_the_chunks_that_a_converter_writes(tmp_path):
    array = random_array((3, 4, 5))
    layout = {"chunk": (1, 4, 5), "order": (0, 2, 1)}
    write_raw(tmp_path / "ours", NAME, array, **layout)
    create_raw_array(tmp_path / "theirs", NAME, shape=array.shape, dtype=array.dtype, **layout)
    open_array(tmp_path / "theirs", NAME, write=True).write(array).result()
    files = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (tmp_path / "ours", tmp_path / "theirs")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 4


def test_a_name_takes_one_raw_array(tmp_path):
    for shape in ((3, 4), (3, 5)):
        layout = {"shape": shape, "dtype": "float32", "chunk": shape, "order": (0, 1)}
        if shape == (3, 4):
            create_raw_array(tmp_path, NAME, **layout)
            continue
        with pytest.raises(ValueError, match="ALREADY_EXISTS"):
            create_raw_array(tmp_path, NAME, **layout)


@pytest.fixture(params=["Orbax's", "raw", "raw, not divided"])
def stored(request, tmp_path):
    """An array [2, 3, 7, 5] on disk, and itself."""
    array = random_array((2, 3, 7, 5), jnp.float32)
    if request.param == "Orbax's":
        with CheckpointStore(tmp_path, keep=1) as store:
            state = {NAME: jnp.asarray(array)}
            store.save(1, state, logical_shapes=state, metadata={})
        return open_array(tmp_path / "1" / "state", NAME), array
    chunk = (1, 1, 7, 5) if request.param == "raw" else (2, 1, 3, 5)
    write_raw(tmp_path, NAME, array, chunk=chunk, order=(0, 1, 3, 2))
    return open_array(tmp_path, NAME), array


def test_a_slice_has_its_dims_in_the_order_asked_for(stored):
    on_disk, array = stored
    for index in ((), (1,), (1, 2), (0, 1, 6)):
        for order in itertools.permutations(range(4 - len(index))):
            for rows in (None, slice(1, 3), slice(2), slice(1, 100), slice(3, 3)):
                read = read_slice(on_disk, index=index, order=order, rows=rows)
                expected = array[index].transpose(order)
                expected = expected if rows is None else expected[rows]
                assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
                assert read.flags.c_contiguous
                assert bits(read) == bits(expected), (index, order, rows)


def test_one_number_is_a_slice_too(stored):
    on_disk, array = stored
    assert bits(read_slice(on_disk, index=(1, 2, 3, 4), order=())) == bits(array[1, 2, 3, 4])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_slice_in_the_order_of_the_file_is_the_file_itself(tmp_path, layers):
    array = random_array((layers, 4, 5), jnp.float32)
    write_raw(tmp_path, NAME, array, chunk=(1, 4, 5), order=(0, 2, 1))
    on_disk = open_array(tmp_path, NAME)
    last = layers - 1
    mapped, read = (read_slice(on_disk, index=(last,), order=order) for order in ((1, 0), (0, 1)))
    assert not mapped.flags.writeable
    new = random_array((5, 4), jnp.float32) + 1
    with chunk_file(tmp_path, NAME, (last, 0, 0)).open("r+b") as file:
        file.write(new.tobytes())
    assert bits(mapped) == bits(new)
    assert bits(read) == bits(array[last])


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_missing_or_short_chunk_is_an_error_and_never_zeros(tmp_path, order):
    array = random_array((3, 4, 5), jnp.float32)
    write_raw(tmp_path, NAME, array, chunk=(1, 4, 5), order=(0, 2, 1))
    chunk_file(tmp_path, NAME, (1, 0, 0)).unlink()
    path = chunk_file(tmp_path, NAME, (2, 0, 0))
    path.write_bytes(path.read_bytes()[:-1])
    on_disk = open_array(tmp_path, NAME)
    assert bits(read_slice(on_disk, index=(0,), order=order)) == bits(array[0].transpose(order))
    for layer in (1, 2):
        with pytest.raises((OSError, ValueError)):
            read_slice(on_disk, index=(layer,), order=order)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device)
    with pytest.raises(OSError, match=NAME):
        read_sharded(on_disk, target)


@pytest.mark.parametrize(
    ("chunk", "spec"),
    [
        ((1, 7, 2), ("data", None, "tensor")),
        ((3, 7, 2), ("data", None, "tensor")),  # The last of three devices has padding only.
        ((1, 7, 2), ("tensor", "data", None)),
        ((1, 2, 2), ("data", None, "tensor")),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_raw_array_is_read_sharded_padded_and_cast(tmp_path, chunk, spec, dtype):
    array = np.random.default_rng(0).normal(size=(3, 7, 2)).astype(jnp.bfloat16)
    write_raw(tmp_path, NAME, array, chunk=chunk, order=(0, 2, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 3), ("data", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    target = jax.ShapeDtypeStruct((6, 8, 3), dtype, sharding=sharding)
    read = read_sharded(open_array(tmp_path, NAME), target)
    assert (read.dtype, read.sharding) == (dtype, sharding)
    expected = np.pad(array.astype(dtype), [(0, 3), (0, 1), (0, 1)])
    np.testing.assert_array_equal(np.asarray(read), expected)


READ_EVERY_SLICE = """
import json, re, sys
from pathlib import Path
import numpy as np
from jaxseek.checkpoint_arrays import open_array, read_slice

def megabytes():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1000

array = open_array(Path(sys.argv[1]), "x")
start = megabytes()
sums = [float(read_slice(array, index=i, order=(1, 0)).max()) for i in np.ndindex(8, 3)]
print(json.dumps({"sums": sums, "peak": megabytes() - start, "orbax": "orbax" in sys.modules}))
"""


def test_slices_of_a_large_array_are_read_in_little_memory_without_orbax(tmp_path):
    experts = jnp.broadcast_to(
        jnp.arange(24, dtype=jnp.float32).reshape(8, 3, 1, 1), (8, 3, 2048, 1536)
    )
    assert experts.nbytes > 300e6
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, {"x": experts}, logical_shapes={"x": experts}, metadata={})
    command = [sys.executable, "-c", READ_EVERY_SLICE, str(tmp_path / "1" / "state")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["sums"] == list(range(24))
    assert not result["orbax"]
    assert result["peak"] < 150, result["peak"]  # 12.6 MB each.

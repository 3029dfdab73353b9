"""Arrays on disk, by TensorStore and without Orbax: whole, sharded over devices, or slice by slice.

Two layouts of the folder that holds the arrays of a checkpoint are read here:

    d/, manifest.ocdbt, ...           what Orbax writes: all arrays in one OCDBT database
    NAME/zarr.json, NAME/c/3/0/0      *raw*: a zarr3 folder for each array, its chunks not encoded

The file of a raw chunk holds the chunk's elements and nothing else, in the order of dims that the
reader of the other side wants. A converter writes it with one copy and reads it with none.
"""

import functools
import itertools
import json
import math
import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

OCDBT_MANIFEST = "manifest.ocdbt"
ORBAX_METADATA = "_METADATA"
CACHE_LINE = 64  # Bytes.
COPY_THREADS = 4


def open_array(
    folder: Path, name: str, *, write: bool = False, context: ts.Context | None = None
) -> ts.TensorStore:
    """One array of a checkpoint, in either layout; nothing of it is read or kept in memory yet.

    Args:
      folder: where the arrays of the checkpoint are.
      name: the leaf's path in the state, `params.embed.kernel`.
      write: whether it may be resized and written.
      context: shared by arrays that are changed in one transaction, so that they are one database
        to TensorStore too.

    Raises:
      ValueError: there is no such array, or its header cannot be read.
    """
    if (folder / OCDBT_MANIFEST).exists():
        database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
        store = {**database, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{folder}/{name}/"}
    spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, read=True, write=write, context=context).result()


def read_sharded(array: ts.TensorStore, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on disk as `target` wants it: its shards read in parallel, zeros beyond its end.

    Another dtype than that of `target` is cast, chunk by chunk, to the nearest, ties to even.

    Not with Orbax, which reads all arrays of a checkpoint into host memory at once, and where a
    failure leaves callbacks behind that print tracebacks.

    Raises:
      OSError, ValueError: a chunk is missing, cut short or cannot be decoded.
    """
    sharding, whole = target.sharding, ts.IndexTransform(input_shape=target.shape)
    placement = {
        device: whole[index].domain
        for device, index in sharding.addressable_devices_indices_map(target.shape).items()
    }
    parts = {part.origin: part for part in placement.values()}  # Replicas are read once.
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        read = functools.partial(_read_part, array, dtype=np.dtype(target.dtype))
        blocks = dict(zip(parts, pool.map(read, parts.values()), strict=True))
    shards = [
        jax.device_put(
            blocks[part.origin],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, part in placement.items()
    ]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def read_slice(
    array: ts.TensorStore,
    *,
    index: tuple[int, ...],
    order: tuple[int, ...],
    rows: slice | None = None,
) -> np.ndarray:
    """`array[index]` with its dims permuted, C-contiguous: one matrix of a stack, transposed.

    Where `index` picks one chunk of a raw array, its file is mapped into memory: the result is the
    map, read-only, if `order` is the stored one, or else a copy of it. Anything else is read, with
    memory for the result, for the chunks being decoded and, if dims are permuted, for the result
    once more.

    Args:
      array: from `open_array`.
      index: of the leading dims.
      order: dim i of the result is dim `order[i]` of `array[index]`.
      rows: the part of the result's first dim to return, in steps of 1; all of it without.

    Raises:
      OSError, ValueError: a chunk is missing, cut short or cannot be decoded.
    """
    raw = _raw_layout(array, leading=len(index))
    if raw is not None:
        view = raw.map_chunk(index).transpose(order)
        return _contiguous(view if rows is None else view[rows])
    view = array[index] if index else array
    if rows is not None:
        start, stop, step = rows.indices(view.shape[order[0]])
        assert step == 1, rows
        view = view[ts.d[order[0]][start : max(start, stop)].translate_to[0]]
    result = np.empty(view.shape, view.dtype.numpy_dtype)
    ts.array(result).write(view).result()
    return _contiguous(result.transpose(order))


def crop(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cuts arrays on disk to `shapes`, all in one transaction."""
    context = ts.Context()  # without it every array would rewrite the whole database's root
    with ts.Transaction(atomic=True) as transaction:
        for name, shape in shapes.items():
            array = open_array(folder, name, write=True, context=context)
            if array.shape != shape:
                array.with_transaction(transaction).resize(exclusive_max=shape).result()


def create_raw_array(
    folder: Path,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: np.typing.DTypeLike,
    chunk: tuple[int, ...],
    order: tuple[int, ...],
) -> None:
    """Writes the header of a raw array, `folder/name/zarr.json`; its chunks are up to the caller.

    The file of a chunk, `chunk_file`, has to hold the chunk's elements in little-endian bytes, in C
    order after its dims are permuted by `order`. All of them have the same size: the chunk at the
    end of a dim that `chunk` does not divide goes on beyond the array, with zeros.

    Args:
      folder: where the arrays of the checkpoint are.
      name: the leaf's path in the state.
      shape: of the array.
      dtype: of the array.
      chunk: shape of a chunk.
      order: dim i of the file is dim `order[i]` of the array.

    Raises:
      ValueError: there is such an array already.
    """
    assert sorted(order) == list(range(len(shape))), (order, shape)
    transpose = {"name": "transpose", "configuration": {"order": list(order)}}
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    metadata = {
        "shape": shape,
        "data_type": np.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [transpose, little_endian],
    }
    store = {"driver": "file", "path": f"{folder}/{name}/"}
    ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result()


def chunk_file(folder: Path, name: str, index: tuple[int, ...]) -> Path:
    """The file of the chunk at `index` in the grid of chunks of a raw array: `NAME/c/3/0/0`."""
    return folder.joinpath(name, "c", *map(str, index))


def write_orbax_metadata(folder: Path, names: Iterable[str]) -> None:
    """Lets Orbax restore a folder of raw arrays too, as a flat dict of NumPy arrays by name."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value}
        for name in names
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / ORBAX_METADATA).write_text(json.dumps(metadata), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class _RawLayout:
    """Files of a raw array whose chunks are whole in all but the `leading` dims, and one there."""

    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    leading: int
    order: tuple[int, ...]

    def map_chunk(self, index: tuple[int, ...]) -> np.ndarray:
        """The array at `index` of the leading dims: a read-only view of the mapped file."""
        bounds = zip(index, self.shape[: self.leading], strict=True)
        assert all(0 <= i < size for i, size in bounds), (index, self.shape)
        whole = self.shape[self.leading :]
        with chunk_file(self.folder, "", index + (0,) * len(whole)).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stored = np.frombuffer(mapped, self.dtype, math.prod(whole))
        stored = stored.reshape([whole[dim] for dim in self.order])
        return stored.transpose([self.order.index(dim) for dim in range(len(whole))])


def _raw_layout(array: ts.TensorStore, *, leading: int | None = None) -> _RawLayout | None:
    """How a raw array lies in its files; `None` if it is none, or cut otherwise. Without `leading`
    any number of leading dims will do: where some have size 1, several describe the same files.
    """
    spec: dict[str, Any] = array.spec().to_json()
    codecs = {codec["name"]: codec.get("configuration", {}) for codec in spec["metadata"]["codecs"]}
    if spec["kvstore"]["driver"] != "file" or list(codecs) != ["transpose", "bytes"]:
        return None
    order = tuple(codecs["transpose"]["order"])
    chunk = tuple(spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"])
    candidates = range(array.ndim + 1) if leading is None else (leading,)
    for leading in candidates:
        whole = (1,) * leading + array.shape[leading:]
        if chunk == whole and order[:leading] == tuple(range(leading)):
            return _RawLayout(
                folder=Path(spec["kvstore"]["path"]),
                shape=array.shape,
                dtype=array.dtype.numpy_dtype,
                leading=leading,
                order=tuple(dim - leading for dim in order[leading:]),
            )
    return None


def _read_part(array: ts.TensorStore, part: ts.IndexDomain, *, dtype: np.dtype) -> np.ndarray:
    """What `part` covers of an array, cast to `dtype`, and zeros where it goes beyond."""
    inside = array.domain.intersect(part)
    block = (np.empty if inside == part else np.zeros)(part.shape, dtype)
    raw = _raw_layout(array)
    if raw is None:
        place = ts.array(block)[ts.d[:].translate_to[part.origin]] if part.rank else ts.array(block)
        place[inside].write(_cast(array[inside], dtype)).result()
        return block

    def read_chunk(index: tuple[int, ...]) -> None:
        here = tuple(i - first for i, first in zip(index, part.origin, strict=False))
        chunk = raw.map_chunk(index)[inside.index_exp[raw.leading :]]
        out = block[(*here, *(slice(size) for size in chunk.shape), ...)]
        if dtype == raw.dtype:
            _copy(out, chunk)
        else:
            ts.array(out).write(_cast(ts.array(_contiguous(chunk)), dtype)).result()

    first, end = inside.origin[: raw.leading], inside.exclusive_max[: raw.leading]
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(read_chunk, itertools.product(*map(range, first, end))))
    return block


def _cast(array: ts.TensorStore, dtype: np.dtype) -> ts.TensorStore:
    return array if array.dtype.numpy_dtype == dtype else ts.cast(array, ts.dtype(dtype))


def _contiguous(x: np.ndarray) -> np.ndarray:
    """`np.ascontiguousarray`; that of a transposed matrix several times faster."""
    if x.flags.c_contiguous:
        return x
    result = np.empty(x.shape, x.dtype)
    _copy(result, x)
    return result


def _copy(out: np.ndarray, x: np.ndarray) -> None:
    """`out[...] = x` for the same dtype; a transposed matrix in pieces that stay in the cache."""
    if x.ndim != 2 or x.strides[0] >= x.strides[1]:
        out[...] = x
        return
    step = CACHE_LINE // x.dtype.itemsize
    for column in range(0, x.shape[1], step):
        out[:, column : column + step] = x[:, column : column + step]

"""A Hugging Face folder straight into sharded parameters: each device's slices, and no others.

Nothing is converted on disk, and no parameter is ever whole in host memory: the largest thing there
is one device's slice of one stacked parameter, in float32.
"""

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from convert.files import dtypes
from convert.import_plan import ImportPlan
from convert.names import HFTensor
from convert.pipeline import Job, run_all
from convert.progress import Progress
from jaxseek.layout import LeafLayout, flatten_paths, unflatten_paths
from jaxseek.model import Params

# (start, stop) of each dim.
_Region = tuple[tuple[int, int], ...]
# A tensor's name, the tensor, and which of its parts belongs to the parameter in hand.
_Source = tuple[str, HFTensor, int]


def load_params(plan: ImportPlan, layout: Params, *, mesh: Mesh) -> Params:
    """float32 parameters from the folder of a plan made with `keep`.

    Args:
        layout: nested dict of `LeafLayout` of all parameters, router bias included.

    Returns:
        nested dict of `jax.Array` in stored shapes and shardings, padded with zeros.
    """
    sources: dict[str, list[_Source]] = collections.defaultdict(list)
    for name, tensor in plan.tensors.items():
        for number, path in enumerate(tensor.paths):
            sources[path].append((name, tensor, number))
    leaves: dict[str, LeafLayout] = flatten_paths(layout)
    total = (
        sum(_size(region) for leaf in leaves.values() for region in _placement(leaf, mesh))
        * np.dtype(np.float32).itemsize
    )
    with Progress("loading", total=total) as progress:
        return unflatten_paths(
            {
                path: _load_leaf(plan, leaf, mesh=mesh, sources=sources[path], progress=progress)
                for path, leaf in leaves.items()
            }
        )


def _load_leaf(
    plan: ImportPlan,
    leaf: LeafLayout,
    *,
    mesh: Mesh,
    sources: Sequence[_Source],
    progress: Progress,
) -> jax.Array:
    sharding = NamedSharding(mesh, leaf.partition)
    shards = []
    for region, devices in _placement(leaf, mesh).items():
        block = np.zeros([stop - start for start, stop in region], np.float32)
        jobs = (
            Job(run=functools.partial(_fill, plan, source, region, block), nbytes=size)
            for source, size in _needed(sources, leaf, region)
        )
        run_all(jobs, done=lambda nbytes: None)
        shards += [jax.device_put(block, SingleDeviceSharding(device)) for device in devices]
        progress.advance(block.nbytes)
    return jax.make_array_from_single_device_arrays(leaf.stored, sharding, shards)


def _placement(leaf: LeafLayout, mesh: Mesh) -> dict[_Region, list[Any]]:
    """The regions of the stored array that devices of this process hold, and which do."""
    placement = collections.defaultdict(list)
    sharding = NamedSharding(mesh, leaf.partition)
    for device, index in sharding.addressable_devices_indices_map(leaf.stored).items():
        assert index is not None
        bounds = (dim.indices(size)[:2] for dim, size in zip(index, leaf.stored, strict=True))
        placement[tuple(bounds)].append(device)
    return placement


def _needed(
    sources: Sequence[_Source], leaf: LeafLayout, region: _Region
) -> Iterator[tuple[_Source, int]]:
    """The sources that a region reads from, and the bytes that each maps while it is read."""
    for source in sources:
        index = source[1].index
        inside = all(start <= i < stop for i, (start, stop) in zip(index, region, strict=False))
        if inside and all(start < n for (start, _), n in zip(region, leaf.logical, strict=True)):
            yield source, 4 * math.prod(source[1].shape)


def _fill(plan: ImportPlan, source: _Source, region: _Region, block: np.ndarray) -> None:
    """Write what a tensor holds of `region` to its place in `block`."""
    name, tensor, number = source
    stack = len(tensor.index)
    place = tuple(i - start for i, (start, _) in zip(tensor.index, region, strict=False))
    wanted = [
        slice(start, min(stop, size))
        for (start, stop), size in zip(region[stack:], tensor.part_shape, strict=True)
    ]
    in_file, shape, inner = _file_region(tensor, number, [wanted[dim] for dim in tensor.order])
    values = plan.read(name, dtype=plan.dtypes[name], region=in_file)
    part = values.reshape(shape)[inner].transpose(np.argsort(tensor.order))
    dtypes.cast(part, "F32", out=block[place][tuple(slice(size) for size in part.shape)])
    plan.release(name)


def _file_region(
    tensor: HFTensor, number: int, wanted: Sequence[slice]
) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[slice, ...]]:
    """The least region of a tensor in its file that holds what is `wanted` of a part.

    Args:
        number: which of the tensor's parts.
        wanted: slices of the part's dims in the tensor's `order`.

    Returns:
        the region; the shape it has when its dims are split as the part's are; what of that is
        wanted.
    """
    sizes = [tensor.part_shape[dim] for dim in tensor.order]
    region, shape, inner = [], [], []
    for dims in _merged_dims(tensor):
        slices = [wanted[dim] for dim in dims]
        lengths = [part.stop - part.start for part in slices]
        # Single indices, then one range: what comes after them is read whole to be contiguous.
        ranged = next((i for i, length in enumerate(lengths) if length > 1), len(dims) - 1)
        row = math.prod(sizes[dim] for dim in dims[ranged + 1 :])
        start = 0
        for dim, part in zip(dims[: ranged + 1], slices, strict=False):
            start = start * sizes[dim] + part.start
        region.append(slice(start * row, (start + lengths[ranged]) * row))
        shape += lengths[: ranged + 1] + [sizes[dim] for dim in dims[ranged + 1 :]]
        inner += [slice(None)] * (ranged + 1) + slices[ranged + 1 :]
    if number:  # such parts follow each other along the rows
        above = number * sizes[-2]
        region[-2] = slice(region[-2].start + above, region[-2].stop + above)
    return tuple(region), tuple(shape), tuple(inner)


def _merged_dims(tensor: HFTensor) -> list[list[int]]:
    """For each dim of the file, which dims of a part, in the tensor's `order`, it is made of."""
    dims = list(range(len(tensor.part_shape)))
    match tensor.form:
        case "flat":
            return [dims]
        case "one_input":
            return [dims[:-1], dims[-1:]]
        case "one_output":
            return [dims[:1], dims[1:]]
    return [[dim] for dim in dims]


def _size(region: _Region) -> int:
    return math.prod(stop - start for start, stop in region)

"""Initial parameters, made on the host: values go by seed, path and layer, never by the mesh.

On the host, because a program that draws random numbers for every parameter takes longer to compile
than a small model takes to learn something.
"""

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxseek.layout import LAYERS_DIM, LeafLayout, ParamSpec, path_name


def init_params(specs: Any, layout: Any, *, mesh: Mesh, seed: int, std: float) -> Any:
    """float32 parameters, each stored as `layout` says: matrices normal with standard deviation
    `std`, norm scales one, biases zero.

    The host holds one parameter at a time, in the slices of this process's devices.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def make(path: Any, spec: ParamSpec, leaf: LeafLayout) -> Array:
            key = (seed, zlib.crc32(path_name(path).encode()))
            return _make_leaf(spec, leaf, mesh=mesh, key=key, std=std, pool=pool)

        return jax.tree_util.tree_map_with_path(make, specs, layout)


def _make_leaf(
    spec: ParamSpec,
    leaf: LeafLayout,
    *,
    mesh: Mesh,
    key: tuple[int, int],
    std: float,
    pool: ThreadPoolExecutor,
) -> Array:
    sharding = NamedSharding(mesh, leaf.partition)
    indices = sharding.addressable_devices_indices_map(leaf.stored)
    shape = sharding.shard_shape(leaf.stored)
    # Devices that store the same slice share one buffer.
    starts = {device: tuple(s.start or 0 for s in index or ()) for device, index in indices.items()}
    buffers = {start: np.zeros(shape, np.float32) for start in starts.values()}
    layers = spec.shape[0] if spec.dims[0] == LAYERS_DIM else None

    def fill(layer: int | None) -> None:
        logical = spec.shape if layer is None else spec.shape[1:]
        values = _values(spec, logical, key=(*key, layer or 0), std=std)
        for start, buffer in buffers.items():
            target, offset = (buffer, start) if layer is None else (buffer[layer], start[1:])
            _copy_slice(values, target, offset)

    list(pool.map(fill, [None] if layers is None else range(layers)))
    # On CPU arrays may lie in the buffer they were put from, those of equal slices in one. Nothing
    # writes to it: XLA copies the memory of others where an array is donated.
    arrays = [jax.device_put(buffers[start], device) for device, start in starts.items()]
    return jax.make_array_from_single_device_arrays(leaf.stored, sharding, arrays)


def _values(
    spec: ParamSpec, shape: tuple[int, ...], *, key: tuple[int, ...], std: float
) -> np.ndarray:
    """One layer's initial values in logical shape."""
    if spec.role == "norm":
        return np.ones(shape, np.float32)
    if spec.role in ("bias", "router_bias"):
        return np.zeros(shape, np.float32)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    return generator.standard_normal(math.prod(shape), np.float32).reshape(shape) * np.float32(std)


def _copy_slice(values: np.ndarray, target: np.ndarray, start: tuple[int, ...]) -> None:
    """Copy into `target`, which begins at `start`, what `values` has there; the rest is padding."""
    source = values[tuple(slice(s, s + n) for s, n in zip(start, target.shape, strict=True))]
    target[tuple(slice(n) for n in source.shape)] = source

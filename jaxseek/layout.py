"""Where a parameter lies: logical shape (the checkpoint's) to stored shape and `PartitionSpec` for
a mesh.

Almost nothing in DeepSeek divides by three, so padding is a property of the layout and never of the
model. For a mesh every parameter has up to two split dims, each rounded up to a multiple of its
devices with zeros at the end:

* the *tensor dim*, split over the tensor axis (heads, ffn width, experts, vocabulary): a layer
  computes with its slice;
* the *ZeRO dim*, split over the axes that are left: a layer sees it whole again, after `gather`.

Zeros are exact, not approximate: a zero head has zero `o_proj` rows, a zero ffn column gives
silu(0) * 0, a padded expert is never routed to, a padded word is masked out of the softmax. Almost
all their gradients are zero by themselves; the exception is `o_proj` where the query heads of a
group are split, since a zero query still attends to real keys. So `gather` cuts the padding off in
both directions, and Adam keeps it zero.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxseek.config import ModelConfig
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape

Role = Literal["matrix", "embedding", "norm", "bias", "router", "router_bias"]
LAYERS_DIM = "layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What a layer declares about one of its parameters.

    Attributes:
        shape: the logical shape, with the leading `layers` dim where layers are stacked.
        dims: a name for each dim; the layout decides by these names what is split.
        role: decides weight decay (`matrix`, `embedding` and `router` only), initial value and
            compute dtype.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    role: Role

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def keeps_float32(self) -> bool:
        """Norm scales and routers compute in float32 whatever the compute dtype is."""
        return self.role in ("norm", "router", "router_bias")

    def stacked(self, layers: int) -> "ParamSpec":
        """The spec of `layers` such parameters in one array."""
        return dataclasses.replace(self, shape=(layers, *self.shape), dims=(LAYERS_DIM, *self.dims))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """How one parameter is stored. Dims count from the end, so that they hold for a layer's slice
    of a stack too.

    Attributes:
        logical: shape in checkpoints and exports.
        stored: shape of the global array on this mesh.
        partition: which mesh axes split which dim of `stored`.
        tensor_dim: the dim split over the tensor axis, if any.
        zero_dim, zero_axes: the dim that `gather` makes whole again and the axes it is split over;
            no axes, no gather.
        model_axes: every mesh axis with more than one device.
        keeps_float32: see `ParamSpec`.
    """

    logical: tuple[int, ...]
    stored: tuple[int, ...]
    partition: PartitionSpec
    tensor_dim: int | None
    zero_dim: int | None
    zero_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    keeps_float32: bool

    @classmethod
    def replicated(cls, shape: tuple[int, ...]) -> "LeafLayout":
        """The layout of a leaf that every device holds whole, such as a counter."""
        return cls(
            logical=shape,
            stored=shape,
            partition=PartitionSpec(),
            tensor_dim=None,
            zero_dim=None,
            zero_axes=(),
            model_axes=(),
            keeps_float32=False,
        )

    def split_axes(self) -> tuple[str, ...]:
        """The mesh axes over which this leaf is split."""
        axes: list[str] = []
        for entry in self.partition:
            axes.extend(entry if isinstance(entry, tuple) else (entry,) if entry else ())
        return tuple(axes)

    def pad(self, x: Array) -> Array:
        """Logical to stored shape."""
        return jnp.pad(x, [(0, s - n) for n, s in zip(self.logical, self.stored, strict=True)])

    def unpad(self, x: Array) -> Array:
        """Stored to logical shape."""
        return x[tuple(slice(n) for n in self.logical)]


def tensor_dims(config: ModelConfig, tensor: int) -> frozenset[str]:
    """Names of the dims that `tensor` devices split.

    Grouped-query attention can be split by kv heads or by the query heads of each group (then every
    device keeps all kv heads). With K kv heads of G query heads each, the first costs a device
    ceil(K/T) * (G + 2) heads of projection and attention, the second K * (ceil(G/T) + 2); the
    cheaper is taken, so that 3 devices help with 1, 2 or 4 kv heads too.
    """
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    by_kv_head = math.ceil(kv_heads / tensor) * (group + 2)
    by_query = kv_heads * (math.ceil(group / tensor) + 2)
    attention = "kv_heads" if by_kv_head <= by_query else "q_per_kv"
    return frozenset({"heads", "mlp", "experts", "vocab", attention})


def plan_leaf(spec: ParamSpec, *, shape: MeshShape, zero: int, split: frozenset[str]) -> LeafLayout:
    """The layout of one parameter.

    From ZeRO 1 on every parameter is split over all devices: what has no tensor dim is split over
    both axes. Of the dims that may carry the ZeRO split, the one that needs the least padding is
    taken, and of those the largest.
    """
    sizes = {DATA_AXIS: shape.data, TENSOR_AXIS: shape.tensor}
    model_axes = tuple(axis for axis, size in sizes.items() if size > 1)
    stored = list(spec.shape)
    partition: list[str | tuple[str, ...] | None] = [None] * len(spec.shape)
    if spec.role == "router_bias":
        whole = LeafLayout.replicated(spec.shape)
        return dataclasses.replace(whole, model_axes=model_axes, keeps_float32=True)
    tensor_dim = next((i for i, name in enumerate(spec.dims) if name in split), None)
    if shape.tensor == 1:
        tensor_dim = None
    elif tensor_dim is not None:
        stored[tensor_dim] = _round_up(stored[tensor_dim], shape.tensor)
        partition[tensor_dim] = TENSOR_AXIS
    zero_axes = (
        tuple(a for a in model_axes if a != TENSOR_AXIS or tensor_dim is None) if zero else ()
    )
    zero_dim = None
    if zero_axes:
        ways = math.prod(sizes[axis] for axis in zero_axes)
        free = [i for i, n in enumerate(spec.dims) if i != tensor_dim and n != LAYERS_DIM]
        chosen = min(
            free, key=lambda i: (_round_up(spec.shape[i], ways) / spec.shape[i], -spec.shape[i])
        )
        stored[chosen] = _round_up(stored[chosen], ways)
        partition[chosen] = zero_axes
        zero_dim = chosen - len(spec.shape)
    return LeafLayout(
        logical=spec.shape,
        stored=tuple(stored),
        partition=PartitionSpec(*partition),
        tensor_dim=None if tensor_dim is None else tensor_dim - len(spec.shape),
        zero_dim=zero_dim,
        zero_axes=zero_axes,
        model_axes=model_axes,
        keeps_float32=spec.keeps_float32,
    )


def plan_layout(specs: Any, *, config: ModelConfig, shape: MeshShape, zero: int) -> Any:
    """Pytree of `ParamSpec` to the pytree of `LeafLayout` for a mesh and a ZeRO level."""
    split = tensor_dims(config, shape.tensor)
    return jax.tree.map(lambda spec: plan_leaf(spec, shape=shape, zero=zero, split=split), specs)


def shardings(layout: Any, mesh: Mesh) -> Any:
    """Pytree of `NamedSharding`, one per leaf of `layout`."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.partition), layout)


def gather(x: Array, leaf: LeafLayout, *, dtype: DTypeLike, wire_dtype: DTypeLike | None) -> Array:
    """A device's stored slice to what a layer computes with: whole in the ZeRO dim, in the compute
    dtype.

    Forward: an all-gather over `leaf.zero_axes`. Backward: the reduce-scatter of the gradient over
    the same axes; where nothing is stored split, an all-reduce. Runs inside the shard_map, on a
    leaf or on a layer's slice of a stack.

    Args:
        dtype: compute dtype; a leaf that `keeps_float32` ignores it.
        wire_dtype: dtype in which values cross the wire; `None` is the compute dtype.
    """
    dtype = jnp.float32 if leaf.keeps_float32 else dtype
    x = _without_padding(x, leaf)
    x = x.astype(jnp.promote_types(dtype, wire_dtype) if wire_dtype else dtype)
    if leaf.zero_axes:
        assert leaf.zero_dim is not None
        dim = x.ndim + leaf.zero_dim
        x = jax.lax.all_gather(x, leaf.zero_axes, axis=dim, tiled=True)
        x = jax.lax.slice_in_dim(x, 0, leaf.logical[leaf.zero_dim], axis=dim)
    missing = tuple(a for a in leaf.model_axes if a not in jax.typeof(x).manual_axis_type.varying)
    if missing:
        x = jax.lax.pcast(x, missing, to="varying")
    return x.astype(dtype)


def _without_padding(x: Array, leaf: LeafLayout) -> Array:
    """`x` with zeros in the tensor dim's padding, and so with zero gradients there."""
    if leaf.tensor_dim is None or leaf.stored[leaf.tensor_dim] == leaf.logical[leaf.tensor_dim]:
        return x
    dim = x.ndim + leaf.tensor_dim
    start = jax.lax.axis_index(TENSOR_AXIS) * x.shape[dim]
    index = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < leaf.logical[leaf.tensor_dim], x, 0)


def check_layout(arrays: Any, layout: Any, *, mesh: Mesh) -> None:
    """Compare every leaf's real shape and sharding with the plan, so that nothing is ever
    replicated silently.

    Raises:
        AssertionError: naming each leaf that differs.
    """
    wrong = []

    def check(path, x: Array, leaf: LeafLayout):
        planned = NamedSharding(mesh, leaf.partition)
        if x.shape != leaf.stored or not x.sharding.is_equivalent_to(planned, x.ndim):
            wrong.append(
                f"{path_name(path)}: {x.shape} {x.sharding}, planned {leaf.stored} {planned}"
            )

    jax.tree_util.tree_map_with_path(check, arrays, layout)
    assert not wrong, "stored otherwise than planned:\n" + "\n".join(wrong)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as `dense_layers.self_attn.q_proj.kernel`."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def flatten_paths(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dict to `{path_name: leaf}`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten_paths(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that `flatten_paths` made flat."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

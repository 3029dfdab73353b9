"""What a training run consists of: the program (everything fixed) and the state (everything that
changes).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxseek import layout as layouts
from jaxseek import model
from jaxseek.initialize import init_params
from jaxseek.layout import LeafLayout
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape
from jaxseek.model import ROUTER_BIAS_PATH, Params
from jaxseek.ops.collectives import Parallel
from jaxseek.optim.adamw import make_adamw
from jaxseek.optim.schedule import learning_rate_schedule
from jaxseek.run_config import RunConfig

# An Array in the state itself; a layout, shape or sharding in a `Program`'s pictures of it.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All arrays of a run, stored as `Program.state_layout` says.

    Attributes:
        step: int32 scalar, optimizer steps taken, skipped ones included.
        updates: int32 scalar, steps whose update was applied; the learning rate goes by it.
        params: float32 master weights, without the router bias.
        router_bias: float32 [L, E] (`e_score_correction_bias` of the MoE layers) or `None`; moved
            by load, not by gradient.
        opt_state: optax state; its moments are split like the parameters.
    """

    step: Leaf
    updates: Leaf
    params: Params
    router_bias: Leaf | None
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Everything a train step is compiled from.

    Attributes:
        specs, layout: pytrees of `ParamSpec` and `LeafLayout` of `TrainState.params`.
        bias_layout: `LeafLayout` of the router bias, or `None`.
        state_layout: a `TrainState` of `LeafLayout`.
        abstract_state: a `TrainState` of `ShapeDtypeStruct` in stored shapes, with shardings.
        zero: ZeRO level, resolved.
    """

    run: RunConfig
    mesh: Mesh
    graphdef: nnx.GraphDef
    specs: Any
    layout: Any
    bias_layout: LeafLayout | None
    state_layout: TrainState
    abstract_state: TrainState
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    zero: int

    @property
    def compute_dtype(self) -> Any:
        """dtype of activations and gathered weights."""
        return jnp.dtype(self.run.dtype)

    @property
    def parallel(self) -> Parallel:
        """The mesh axes with more than one device, as layers see them."""
        sizes = dict(self.mesh.shape)
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return Parallel(
            data_axis=DATA_AXIS if sizes[DATA_AXIS] > 1 else None,
            tensor_axis=TENSOR_AXIS if sizes[TENSOR_AXIS] > 1 else None,
            wire_dtype=jnp.float32 if on_cpu else None,
        )

    @property
    def state_shardings(self) -> TrainState:
        """`NamedSharding` of every array of the state."""
        return layouts.shardings(self.state_layout, self.mesh)

    @property
    def logical_shapes(self) -> TrainState:
        """`ShapeDtypeStruct` of every array in the shape that checkpoints know."""
        return jax.tree.map(
            lambda leaf, x: jax.ShapeDtypeStruct(leaf.logical, x.dtype),
            self.state_layout,
            self.abstract_state,
        )

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of arrays [accumulation, batch, T]: the batch is split over the data axis."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.parallel.data_axis))

    def gather(self, part: str, params: Params) -> Params:
        """The parameters of one part of the model (or one layer of a stack), whole and in the
        compute dtype.
        """
        layout = attach_bias(self.layout, self.bias_layout)
        return _gather_tree({part: params}, {part: layout[part]}, self)[part]

    def gather_all(self, params: Params) -> Params:
        """All parameters, whole and in the compute dtype."""
        return _gather_tree(params, self.layout, self)


def make_program(run: RunConfig, mesh: Mesh) -> Program:
    """Plan a run on a mesh; no array is made."""
    config = run.model
    graphdef, all_specs = model.split(config)
    shape = MeshShape(data=mesh.shape[DATA_AXIS], tensor=mesh.shape[TENSOR_AXIS])
    zero = run.resolved_zero
    all_layout = layouts.plan_layout(all_specs, config=config, shape=shape, zero=zero)
    specs, _ = detach_bias(all_specs)
    layout, bias_layout = detach_bias(all_layout)
    optimizer = make_adamw(run.optim, specs)
    scalar = LeafLayout.replicated(())
    params, bias = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.stored, jnp.float32), (layout, bias_layout)
    )
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_layout = optax.tree_utils.tree_map_params(
        optimizer, lambda _, leaf: leaf, opt_state, layout, transform_non_params=lambda _: scalar
    )
    count = jax.ShapeDtypeStruct((), jnp.int32)
    abstract = TrainState(
        step=count, updates=count, params=params, router_bias=bias, opt_state=opt_state
    )
    state_layout = TrainState(
        step=scalar, updates=scalar, params=layout, router_bias=bias_layout, opt_state=opt_layout
    )
    return Program(
        run=run,
        mesh=mesh,
        graphdef=graphdef,
        specs=specs,
        layout=layout,
        bias_layout=bias_layout,
        state_layout=state_layout,
        abstract_state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract,
            layouts.shardings(state_layout, mesh),
        ),
        optimizer=optimizer,
        schedule=learning_rate_schedule(run.optim, steps=run.steps),
        zero=zero,
    )


def init_state(program: Program) -> TrainState:
    """The state before the first step, every array made where it is stored."""
    run = program.run
    params = init_params(
        program.specs,
        program.layout,
        mesh=program.mesh,
        seed=run.seed,
        std=run.model.initializer_range,
    )
    return state_from_params(program, params, router_bias=None)


def state_from_params(program: Program, params: Params, *, router_bias: Array | None) -> TrainState:
    """A fresh state around stored `params`; the router bias starts at zero where none is given."""
    shardings = program.state_shardings

    def rest(params):
        bias = router_bias
        if bias is None and program.bias_layout is not None:
            bias = jnp.zeros(program.bias_layout.stored, jnp.float32)
        return (
            bias,
            program.optimizer.init(params),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    out = (shardings.router_bias, shardings.opt_state, shardings.step, shardings.updates)
    bias, opt_state, step, updates = jax.jit(rest, out_shardings=out)(params)
    state = TrainState(
        step=step, updates=updates, params=params, router_bias=bias, opt_state=opt_state
    )
    layouts.check_layout(state, program.state_layout, mesh=program.mesh)
    return state


def logical_params(program: Program, state: TrainState) -> Params:
    """All parameters in logical shape as numpy arrays on the host, router bias included."""
    params = jax.tree.map(
        lambda x, leaf: np.asarray(x)[tuple(slice(n) for n in leaf.logical)],
        state.params,
        program.layout,
    )
    bias = None if state.router_bias is None else np.asarray(state.router_bias)
    return attach_bias(params, bias)


def attach_bias(tree: Params, bias: Any) -> Params:
    """`tree` with the router bias at its place in the model; unchanged where there is none."""
    return (
        tree
        if bias is None
        else _edit(tree, ROUTER_BIAS_PATH, lambda gate: {**gate, ROUTER_BIAS_PATH[-1]: bias})
    )


def detach_bias(tree: Params) -> tuple[Params, Any]:
    """`tree` without its router bias, and the bias or `None`."""
    node: Any = tree
    for key in ROUTER_BIAS_PATH:
        if key not in node:
            return tree, None
        node = node[key]
    return _edit(
        tree,
        ROUTER_BIAS_PATH,
        lambda gate: {k: v for k, v in gate.items() if k != ROUTER_BIAS_PATH[-1]},
    ), node


def _edit(tree: Params, path: tuple[str, ...], change: Any) -> Params:
    """A copy of nested dicts, `change` applied to the dict that holds the last key of `path`."""
    if len(path) == 1:
        return change(tree)
    return {**tree, path[0]: _edit(tree[path[0]], path[1:], change)}


def _gather_tree(params: Params, layout: Any, program: Program) -> Params:
    """Every leaf gathered; profiles and plans name the collective after the parameter."""
    wire = program.parallel.wire_dtype

    def gather(path: Any, x: Array, leaf: LeafLayout) -> Array:
        with jax.named_scope(layouts.path_name(path)):
            return layouts.gather(x, leaf, dtype=program.compute_dtype, wire_dtype=wire)

    return jax.tree_util.tree_map_with_path(gather, params, layout)

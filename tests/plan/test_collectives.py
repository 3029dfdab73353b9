"""What one GPU sends: kinds, axes, counts, overlap; on recorded and on compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxseek.mesh import MeshShape, make_mesh
from jaxseek.plan.collectives import find_collectives, wire_bytes
from jaxseek.plan.hlo import parse_hlo
from tests.plan.test_hlo import RECORDED

MESH = {"data": 2, "tensor": 3}
# Of the recorded program: five layers' weights of 512 x 512 in bf16 on one tensor rank.
WEIGHT = 512 * 512 * 2
ACTIVATIONS = 128 * 512 * 2


def entry(*lines, mesh=MESH):
    body = "\n".join(f"  {line}" for line in ("%x = f32[60]{0} parameter(0)", *lines))
    text = f"%sum (a: f32[]) -> f32[] {{\n}}\nENTRY %main (p: s32[]) -> s32[] {{\n{body}\n}}"
    return find_collectives(parse_hlo(text), mesh=mesh)


def test_the_recorded_layers_send_what_five_layers_have_to():
    module = parse_hlo((RECORDED / "layers_2x3.hlo").read_text())
    sent = wire_bytes(find_collectives(module, mesh=MESH))
    # Gathered forward and backward over 2, scattered once; the inner loop of three reduces its
    # activations over 3 forward (not in the last layer: only the gradient was asked for), forward
    # again, and backward.
    assert sent == {
        "data": {"all-gather": 2 * 5 * WEIGHT // 2, "reduce-scatter": 5 * WEIGHT // 2},
        "tensor": {"all-reduce": 3 * (4 + 5 + 5) * 2 * ACTIVATIONS * 2 // 3},
    }


def test_in_the_recorded_program_only_pairs_with_a_product_between_overlap():
    module = parse_hlo((RECORDED / "layers_2x3.hlo").read_text())
    overlapped = {c.origin: c.overlapped for c in find_collectives(module, mesh=MESH)}
    assert overlapped["all-gather-start.1"]  # a fused product stands before its done
    assert not overlapped["all-gather-start.2"]  # waited for at once
    assert overlapped["all-reduce-start.1"] and not overlapped["all-reduce-start"]


@pytest.mark.parametrize(
    ("opcode", "once"),
    [
        ("all-gather", 240 * 2),
        ("all-reduce", 2 * 240 * 2 / 3),
        ("reduce-scatter", 240 * 2 / 3),
        ("all-to-all", 240 * 2 / 3),
    ],
)
def test_a_collective_of_three_sends_what_its_ring_sends(opcode, once):
    [found] = entry(f"%y = f32[60]{{0}} {opcode}(%x), replica_groups={{{{0,1,2}},{{3,4,5}}}}")
    assert (found.kind, found.axis, found.group, found.wire_bytes) == (opcode, "tensor", 3, once)


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("{{0,1,2},{3,4,5}}", "tensor"),
        ("{{0,3},{1,4},{2,5}}", "data"),
        ("{{0,1,2,3,4,5}}", "data+tensor"),
        ("{{0,1},{2,3},{4,5}}", "other"),
        ("[2,3]<=[6]", "tensor"),
        ("[3,2]<=[2,3]T(1,0)", "data"),
        ("[1,6]<=[6]", "data+tensor"),
        ("{}", "data+tensor"),
        ("mesh['data'=2,'tensor'=3] {'tensor'}", "tensor"),
        ("mesh['data'=2,'tensor'=3] {'data'}", "data"),
        ("mesh['data'=2,'tensor'=3] {'data','tensor'}", "data+tensor"),
    ],
)
def test_replica_groups_in_every_notation_name_the_axes_they_cross(groups, axis):
    [found] = entry(f"%y = f32[60]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%sum")
    assert found.axis == axis


@pytest.mark.parametrize("groups", ["mesh['data'=2,'tensor'=3] {'seq'}", "<new notation>"])
def test_replica_groups_in_an_unknown_notation_are_no_guess(groups):
    with pytest.raises(ValueError, match="replica groups"):
        entry(f"%y = f32[60]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%sum")


def test_a_permutation_sends_its_operand_along_the_axis_it_moves_on():
    pairs = "{{0,1},{1,2},{2,0},{3,4},{4,5},{5,3}}"
    [found] = entry(f"%y = f32[60]{{0}} collective-permute(%x), source_target_pairs={pairs}")
    assert (found.axis, found.wire_bytes) == ("tensor", 240)


def test_a_ragged_exchange_sends_its_values_and_not_its_sizes():
    groups = "replica_groups={{0,1,2},{3,4,5}}"
    [found] = entry(
        "%n = s32[3]{0} parameter(1)",
        f"%y = f32[60]{{0}} ragged-all-to-all(%x, %x, %n, %n, %n, %n), {groups}",
    )
    assert (found.axis, found.dtypes, found.wire_bytes) == ("tensor", ("f32",), 240 * 2 / 3)


def test_a_collective_of_one_device_sends_nothing():
    assert not entry("%y = f32[60]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%sum")


def test_a_collective_in_a_loop_of_unknown_length_cannot_be_billed():
    text = (
        "%b (p: s32[]) -> s32[] {\n  %x = f32[3] parameter(0)\n"
        "  %y = f32[3] all-reduce(%x), replica_groups={}\n}\n"
        "ENTRY %main (p: s32[]) -> s32[] {\n  %w = s32[] while(%p), body=%b\n}"
    )
    with pytest.raises(ValueError, match="y runs in a loop of unknown trip count"):
        find_collectives(parse_hlo(text), mesh=MESH)


def pair(*between, sync="false"):
    backend = f'backend_config={{"collective_backend_config":{{"is_sync":{sync}}}}}'
    [found] = entry(
        f"%s = f32[60]{{0}} all-reduce-start(%x), replica_groups={{}}, to_apply=%sum, {backend}",
        *between,
        "%d = f32[60]{0} all-reduce-done(%s)",
        "%late = f32[60]{0} custom-call(%d)",
    )
    return found.overlapped


def test_a_collective_overlaps_with_a_product_and_not_with_small_change():
    assert pair("%p = f32[60]{0} custom-call(%x)")
    assert not pair("%p = f32[60]{0} add(%x, %x)")
    assert not pair()
    assert not pair("%p = f32[60]{0} custom-call(%x)", sync="true")
    assert not pair("%p = f32[60]{0} call(%x), to_apply=%sum")


def test_a_compiled_scan_is_billed_once_per_layer_forward_and_backward():
    mesh = make_mesh(MeshShape(data=3, tensor=2))

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.all_gather(w, "data", axis=0, tiled=True)), None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights)[0].sum()

    specs = (PartitionSpec(None, "data"), PartitionSpec("data"))
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=specs[0])
    weights, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((7, 30, 30), (6, 30)), specs, strict=True)
    )
    text = jax.jit(step).lower(weights, x).compile().as_text()
    sent = wire_bytes(find_collectives(parse_hlo(text), mesh=dict(mesh.shape)))
    moved = 7 * 30 * 30 * 4 * 2 // 3
    assert sent["data"] == {"all-gather": 2 * moved, "reduce-scatter": moved}

"""The reader of compiled programs, on a recorded one and on single lines."""

from pathlib import Path

import pytest

from jaxseek.plan.hlo import Shape, parse_hlo

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def layers():
    return parse_hlo((RECORDED / "layers_2x3.hlo").read_text())


def one(line):
    """The only instruction of an entry computation."""
    [instruction] = parse_hlo(f"ENTRY %main (p: s32[]) -> s32[] {{\n  {line}\n}}").computations[
        "main"
    ]
    return instruction


def test_an_instruction_is_read_with_its_result_operands_and_attributes():
    instruction = one(
        "ROOT %ag.1 = ((bf16[4,6]{1,0:T(8,128)}, f32[3]), (bf16[8,6], f32[6])) "
        "all-gather-start(%a, %b.2), replica_groups={{0,1}}, dimensions={0}"
    )
    assert (instruction.name, instruction.opcode) == ("ag.1", "all-gather-start")
    assert instruction.operands == ("a", "b.2")
    assert [shape.dims for shape in instruction.shapes] == [(4, 6), (3,), (8, 6), (6,)]
    assert instruction.attributes.endswith("replica_groups={{0,1}}, dimensions={0}")


def test_operands_printed_with_their_types_are_the_same_operands():
    assert one("%add = f32[2] add(f32[2]{0} %a, f32[2]{0} %b)").operands == ("a", "b")


def test_the_computations_an_instruction_runs_are_found_in_every_spelling():
    assert one("%w = s32[] while(%t), condition=%c, body=%b").callees == ("c", "b")
    assert one("%f = s32[] fusion(%t), kind=kLoop, calls=%f.1").callees == ("f.1",)
    branches = "%x = s32[] conditional(%i), branch_computations={%p, %q}"
    assert one(branches).callees == ("p", "q")


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        ("bf16", (3, 5), 30),
        ("f32", (), 4),
        ("pred", (7,), 7),
        ("s4", (3,), 2),
        ("f8e4m3fn", (9,), 9),
        ("u64", (2,), 16),
        ("token", (), 0),
        ("f32", (0, 4), 0),
    ],
)
def test_the_size_of_an_array_follows_its_dtype(dtype, dims, size):
    assert Shape(dtype=dtype, dims=dims).bytes == size


def test_a_loop_in_a_loop_runs_the_product_of_the_trip_counts(layers):
    # Five layers, the first iterations peeled off, with an inner loop of three each.
    counts: dict[str, list[int | None]] = {}
    for name, count in layers.runs():
        counts.setdefault(name, []).append(count)
    assert counts[layers.entry] == [1]
    assert counts["region_0.4_spmd.1"] == [4]
    assert counts["region_1.2_spmd.clone"] == [12]
    assert counts["region_6.7_spmd.clone"] == [9]


def test_a_loop_whose_trip_count_is_unknown_makes_the_counts_inside_unknown():
    module = parse_hlo(
        "%b (p: s32[]) -> s32[] {\n  %x = s32[] add(%p, %p)\n}\n"
        "%c (p: s32[]) -> pred[] {\n  %y = pred[] constant(true)\n}\n"
        "ENTRY %main (p: s32[]) -> s32[] {\n  %w = s32[] while(%p), condition=%c, body=%b\n}"
    )
    assert dict(module.runs()) == {"main": 1, "b": None, "c": None}


def test_what_an_asynchronous_call_runs_is_run_once():
    module = parse_hlo(
        "%wrapped (p: f32[6]) -> f32[2] {\n  %y = f32[2] reduce-scatter(%p)\n}\n"
        "ENTRY %main (p: f32[6]) -> f32[2] {\n"
        "  %s = ((f32[6]), f32[2], u32[]) async-start(%p), calls=%wrapped\n"
        "  %u = ((f32[6]), f32[2], u32[]) async-update(%s), calls=%wrapped\n"
        "  ROOT %d = f32[2] async-done(%u), calls=%wrapped\n}"
    )
    assert list(module.runs()) == [("main", 1), ("wrapped", 1)]


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule nothing\n")

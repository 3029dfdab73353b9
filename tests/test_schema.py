"""Dotted keys of config trees: nearest names, typed values, building."""

import dataclasses
from typing import Literal

import pytest

from jaxseek.errors import UserError
from jaxseek.run_config import RunConfig
from jaxseek.schema import (
    Setting,
    build,
    check_keys,
    describe_type,
    leaves,
    nearest_names,
    to_settings,
    typed_value,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """Inside.

    Attributes:
        width: how wide,
            in metres.
    """

    width: float
    depth: float = 1.0

    def __post_init__(self):
        if self.depth <= 0:
            raise UserError("depth must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Outside."""

    count: int
    name: str = "a"
    inner: Inner | None = None


def given(**values):
    """Settings as a file would give them; `__` in a name stands for the dot."""
    dotted = {name.replace("__", "."): value for name, value in values.items()}
    return {key: Setting(value=value, origin=f"file: {key}") for key, value in dotted.items()}


def test_leaves_are_dotted_and_carry_the_docstrings_description():
    assert list(leaves(Outer)) == ["count", "name", "inner.width", "inner.depth"]
    assert leaves(Outer)["inner.width"].description == "how wide, in metres."


def test_every_key_of_a_run_has_a_description_for_help():
    undescribed = [
        key
        for key, leaf in leaves(RunConfig).items()
        if not key.startswith("model.") and not leaf.description
    ]
    assert undescribed == []


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.learning-rte", ["optim.learning_rate"]),
        ("trian.lr", ["optim.learning_rate"]),
        ("learning-rate", ["optim.learning_rate"]),
        ("wd", ["optim.weight_decay"]),
        ("evry", ["eval.every", "checkpoint.every"]),
        ("hidden_size", ["model.hidden_size"]),
        ("model.rope_scaling.type", ["model.rope_scaling.rope_type"]),
        ("colour", []),
    ],
)
def test_unknown_key_finds_the_nearest_with_its_section(key, nearest):
    assert nearest_names(key, leaves(RunConfig)) == nearest


def test_section_given_a_value_is_refused_and_only_an_optional_one_may_be_null():
    check_keys(given(inner=None), Outer)
    with pytest.raises(UserError, match=r"file: inner .*section, with keys such as inner\.width"):
        check_keys(given(inner=3), Outer)
    with pytest.raises(UserError, match=r"file: optim .*section, with keys such as optim\."):
        check_keys(given(optim=None), RunConfig)


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        ("3", int, 3),
        ("3e-4", float, 3e-4),
        (1, float, 1.0),
        ("true", bool, True),
        ("3", str, "3"),
        ("null", int | None, None),
        ("2", Literal[0, 1, 2, 3] | None, 2),
        ("[0.5, 1]", tuple[float, float], (0.5, 1.0)),
        ([0.5, 1], tuple[float, float], (0.5, 1.0)),
    ],
)
def test_value_of_the_type_or_its_text_is_taken(value, annotation, result):
    taken = typed_value(Setting(value=value, origin="x"), annotation)
    assert taken == result and type(taken) is type(result)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("abc", int, "a whole number"),
        (3.5, int, "a whole number"),
        (True, int, "a whole number"),
        (None, int, "a whole number"),
        ("[1", int, "a whole number"),
        (True, float, "a number"),
        (float("nan"), float, "a number"),
        (float("inf"), float | None, "a number or null"),
        (3, str, "text"),
        (1, bool, "true or false"),
        ("x", Literal["a", "b"], "one of a, b"),
        (True, Literal[0, 1] | None, "one of 0, 1 or null"),
        ([1, 2, 3], tuple[float, float], "a list of 2 numbers"),
    ],
)
def test_value_of_another_type_is_refused_with_what_is_expected(value, annotation, expected):
    with pytest.raises(UserError) as error:
        typed_value(Setting(value=value, origin="run.yaml, line 3: key"), annotation)
    assert str(error.value) == f"run.yaml, line 3: key: {value!r} is not {expected}."


def test_every_type_of_a_run_can_be_described():
    for leaf in leaves(RunConfig).values():
        assert describe_type(leaf.type)


def test_build_fills_sections_and_keeps_defaults():
    assert build(Outer, given(count=2, inner__width=3)) == Outer(count=2, inner=Inner(width=3.0))
    assert build(Outer, given(count=2, inner=None)) == Outer(count=2)


def test_missing_key_is_named_with_its_section():
    with pytest.raises(UserError, match=r"^inner\.width is needed and not given"):
        build(Outer, given(count=2, inner__depth=3))


def test_refusal_by_a_section_names_the_section():
    with pytest.raises(UserError, match=r"^inner: depth must be positive"):
        build(Outer, given(count=2, inner__width=3, inner__depth=0))


def test_settings_of_a_tree_build_an_equal_tree():
    for tree in (Outer(count=2), Outer(count=2, name="b", inner=Inner(width=3.0))):
        assert build(Outer, to_settings(tree)) == tree

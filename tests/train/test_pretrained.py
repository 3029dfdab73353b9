"""First weights from a folder: the same on every mesh, from Hugging Face's files and ours."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from convert.to_jax import to_jax
from jaxseek.layout import flatten_paths
from jaxseek.mesh import make_mesh
from jaxseek.run_config import RunConfig
from jaxseek.train.pretrained import open_pretrained
from jaxseek.train.state import attach_bias, make_program, state_from_params
from tests.convert.folders import write_folder
from tests.tiny import TINY

FOLDERS = {
    "coder": {"dtype": "F32", "shards": 2},
    "v3": {"dtype": "mixed", "fused": True},
    "v2": {"fp8": True, "shards": 3},
}
PLACES = [("1x1", 0), ("3x1", 0), ("3x1", 3), ("1x3", 0), ("2x3", 3)]


@pytest.fixture(scope="module", params=FOLDERS)
def folders(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """A model's name in TINY, its Hugging Face folder, and what convert made of that."""
    base = tmp_path_factory.mktemp("base")
    write_folder(base / "hf", TINY[request.param], **FOLDERS[request.param])
    to_jax(base / "hf", base / "jax")
    return request.param, base / "hf", base / "jax"


def load(model: str, folder: Path, mesh: str, zero: int):
    """The program, and a whole state around the weights of a folder."""
    program = _program(model, mesh, zero)
    run = dataclasses.replace(program.run, init_from=str(folder))
    params, router_bias = open_pretrained(run).load(program)
    # `state_from_params` checks dtypes, shapes and shardings of all that it is given.
    return program, state_from_params(program, params, router_bias=router_bias)


@functools.cache
def _program(model: str, mesh: str, zero: int):
    run = RunConfig(model=TINY[model], mesh=mesh, zero=zero, batch=12, seq_len=8)
    return make_program(run, make_mesh(run.mesh_shape))


@pytest.mark.parametrize(("mesh", "zero"), PLACES)
def test_a_folder_and_its_conversion_give_the_same_state_bit_for_bit(folders, mesh, zero):
    model, hf, converted = folders
    _, first = load(model, hf, mesh, zero)
    _, second = load(model, converted, mesh, zero)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.parametrize(("mesh", "zero"), PLACES[1:])
def test_the_weights_do_not_depend_on_the_mesh(folders, mesh, zero):
    model, hf, _ = folders
    for (path, leaf), other in zip(
        _logical(*load(model, hf, "1x1", 0)).items(),
        _logical(*load(model, hf, mesh, zero)).values(),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf, other, err_msg=path, strict=True)


def test_the_router_bias_comes_along(folders):
    model, hf, _ = folders
    _, state = load(model, hf, "3x1", 3)
    assert (state.router_bias is not None) == (model == "v3")
    assert state.router_bias is None or np.asarray(state.router_bias).all()


def test_what_the_run_changes_of_the_folders_model_is_told(folders):
    model, hf, converted = folders
    changed = dataclasses.replace(TINY[model], max_position_embeddings=64, rms_norm_eps=1e-5)
    for folder in (hf, converted):
        run = RunConfig(model=changed, seq_len=8, init_from=str(folder))
        told = " ".join(open_pretrained(run).notes)
        assert f"other than in {folder}: " in told
        assert "max_position_embeddings 512 -> 64, rms_norm_eps 1e-06 -> 1e-05" in told


def _logical(program, state) -> dict[str, np.ndarray]:
    """Parameters in logical shape by path, router bias included."""
    layout = flatten_paths(attach_bias(program.layout, program.bias_layout))
    arrays = flatten_paths(attach_bias(state.params, state.router_bias))
    return {
        path: np.asarray(x)[tuple(map(slice, layout[path].logical))] for path, x in arrays.items()
    }

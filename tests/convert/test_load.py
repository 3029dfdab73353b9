"""A Hugging Face folder read straight into sharded parameters, each device its own part."""

import functools
import math
import mmap
import types
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import convert.load
from convert.files import dtypes
from convert.files.hf_folder import open_hf_folder
from convert.import_plan import ImportPlan, plan_import
from convert.load import load_params
from convert.names import params_from_hf
from jaxseek.config import ModelConfig
from jaxseek.layout import LeafLayout, flatten_paths, shardings
from jaxseek.mesh import make_mesh
from jaxseek.run_config import RunConfig
from jaxseek.train.state import attach_bias, make_program
from tests.convert.folders import FP8_BLOCK, write_folder
from tests.tiny import TINY

# Name of the model in TINY, and how its folder is written.
FOLDERS = {
    "one tensor per head group": ("coder", {}),
    "one key head": ("coder-mqa", {"dtype": "F32"}),
    "biases": ("qwen2", {"dtype": "F16", "shards": 2}),
    "latent attention and experts": ("v3", {"dtype": "mixed", "shards": 3}),
    "fused experts": ("v2", {"fused": True}),
    "FP8": ("v3", {"fp8": True, "shards": 2}),
}
PLACES = [("1x1", 0), ("3x1", 0), ("3x1", 3), ("1x3", 0), ("2x3", 0), ("2x3", 3), ("5x1", 3)]


@functools.cache
def layout_of(model: str, mesh: str, zero: int) -> dict:
    """Layouts of all parameters."""
    run = RunConfig(model=TINY[model], mesh=mesh, zero=zero, batch=30, seq_len=8)
    program = make_program(run, make_mesh(run.mesh_shape))
    return attach_bias(program.layout, program.bias_layout)


def load(plan: ImportPlan, model: str, mesh: str, zero: int) -> dict[str, jax.Array]:
    devices = make_mesh(RunConfig(model=TINY[model], mesh=mesh, batch=30).mesh_shape)
    return flatten_paths(load_params(plan, layout_of(model, mesh, zero), mesh=devices))


def expected(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by path, from what the files hold."""
    values = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            for dim, block in enumerate(FP8_BLOCK):
                scale = np.repeat(scale, block, axis=dim).take(range(tensor.shape[dim]), axis=dim)
            tensor = (tensor.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
        if not name.endswith("_scale_inv"):
            values[name] = tensor.astype(np.float32)
    return flatten_paths(params_from_hf(config, values))


@pytest.fixture(scope="module", params=FOLDERS)
def case(request, tmp_path_factory):
    """A model's name, the plan of its folder, and its parameters by path."""
    model, options = FOLDERS[request.param]
    path: Path = tmp_path_factory.mktemp("folder") / "model"
    tensors = write_folder(path, TINY[model], **options)
    with open_hf_folder(path) as folder:
        yield model, plan_import(folder), expected(TINY[model], tensors)


@pytest.mark.parametrize(("mesh", "zero"), PLACES)
def test_loaded_parameters_equal_the_files_bit_for_bit_and_padding_is_zero(case, mesh, zero):
    model, plan, wanted = case
    layouts: dict[str, LeafLayout] = flatten_paths(layout_of(model, mesh, zero))
    loaded = load(plan, model, mesh, zero)
    assert loaded.keys() == wanted.keys() == layouts.keys()
    for path, array in loaded.items():
        padded = np.zeros(layouts[path].stored, np.float32)
        padded[tuple(slice(n) for n in layouts[path].logical)] = wanted[path]
        assert array.dtype == np.float32, path
        np.testing.assert_array_equal(np.asarray(array), padded, err_msg=path, strict=True)


@pytest.mark.parametrize(("mesh", "zero"), PLACES)
def test_each_device_stores_what_the_layout_says(case, mesh, zero):
    model, plan, _ = case
    layout = layout_of(model, mesh, zero)
    shape = RunConfig(model=TINY[model], mesh=mesh, batch=30).mesh_shape
    wanted = flatten_paths(shardings(layout, make_mesh(shape)))
    for path, array in load(plan, model, mesh, zero).items():
        assert array.sharding.is_equivalent_to(wanted[path], array.ndim), path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(array)[shard.index])


@pytest.mark.parametrize(("mesh", "zero"), PLACES)
def test_every_value_is_taken_once_from_the_mapped_file_however_many_devices_share_it(
    case, mesh, zero, monkeypatch
):
    model, plan, wanted = case
    taken, copies = [], []

    def cast(array, dtype, *, out):
        taken.append(array.size)
        copies.append(not _is_mapped(array))
        return dtypes.cast(array, dtype, out=out)

    monkeypatch.setattr(convert.load, "dtypes", types.SimpleNamespace(cast=cast))
    load(plan, model, mesh, zero)
    assert sum(taken) == sum(array.size for array in wanted.values())
    assert bool(plan.scales) or not any(copies), "only FP8 is computed before it is stored"


def test_each_device_dequantises_its_part_of_a_matrix(tmp_path, monkeypatch):
    write_folder(tmp_path / "model", TINY["v3"], fp8=True)
    with open_hf_folder(tmp_path / "model") as folder:
        plan = plan_import(folder)
        sizes: dict[str, list[int]] = {name: [] for name in plan.scales}
        read = ImportPlan.read

        def read_and_note(self, name, **how):
            values = read(self, name, **how)
            if name in sizes:
                sizes[name].append(values.size)
            return values

        monkeypatch.setattr(ImportPlan, "read", read_and_note)
        load(plan, "v3", "1x3", 0)
    for name, parts in sizes.items():
        assert sum(parts) == math.prod(plan.tensors[name].shape), name
        # A device holds whole experts, and all hold what comes down to the latent vectors.
        assert len(parts) > 1 or "experts." in name or "_a_proj" in name, f"{name} whole"


def _is_mapped(array: np.ndarray) -> bool:
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap) or isinstance(getattr(base, "obj", None), mmap.mmap)

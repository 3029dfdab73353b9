"""Folders written by transformers, through jaxseek and back: every bit, every field.

From a converted checkpoint, and from training states on several meshes with optimizer state and
padding, which is what a run leaves.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from convert.files.hf_folder import open_hf_folder
from convert.import_plan import plan_import
from convert.load import load_params
from convert.names import params_to_hf
from convert.to_hf import to_hf
from convert.to_jax import to_jax
from jaxseek.checkpoint import CheckpointStore
from jaxseek.mesh import make_mesh
from jaxseek.paths import CHECKPOINTS
from jaxseek.run_config import RunConfig
from jaxseek.schema import to_values
from jaxseek.train.state import attach_bias, detach_bias, make_program, state_from_params
from tests.convert.folders import write_folder
from tests.parity.oracle import FAMILIES, build, oracle
from tests.tiny import TINY

MESHES = ("1x1", "3x1", "1x3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Every family as transformers saves it, in float32; those with a class in bfloat16 too."""
    root = tmp_path_factory.mktemp("written")
    written = {}
    for family in FAMILIES:
        written[family] = root / family
        model, _ = build(family)
        if family == "moe-16b":  # of its type transformers has no class: the hub's layout by hand
            _write_moe_16b(written[family])
            continue
        model.save_pretrained(written[family])
        model.to(torch.bfloat16).save_pretrained(root / f"{family}-bf16")
        written[f"{family}-bf16"] = root / f"{family}-bf16"
    return written


NAMES = (*FAMILIES, *(f"{family}-bf16" for family in FAMILIES if family != "moe-16b"))


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_folder_comes_back_bit_for_bit(folders, name, tmp_path):
    to_jax(folders[name], tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back")
    assert_same(folders[name], tmp_path / "back")


@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_torch_come_back_bit_for_bit(shards, tmp_path):
    """With what a state dict may hold: views of one storage, transposed ones, tied weights."""
    config = dataclasses.replace(TINY["v3"], num_nextn_predict_layers=1)
    hf = tmp_path / "hf"
    write_folder(hf, config, mtp=True)
    state = read_all(hf)
    (hf / "model.safetensors").unlink()
    for copy in ("embed_tokens", "shared_head.head"):
        state[f"model.layers.2.{copy}.weight"] = state["model.embed_tokens.weight"]
    for name in [name for name in state if name.endswith("o_proj.weight")]:
        state[name] = torch.nn.Parameter(state[name].t().contiguous().t())
    gate_up = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    both = torch.cat([state[name] for name in gate_up])
    state |= dict(zip(gate_up, both.chunk(2), strict=True))
    _save_as_bin(state, hf, shards=shards)
    to_jax(hf, tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back")
    back = read_all(tmp_path / "back")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_state_on_any_mesh_exports_the_bits_it_was_loaded_with(
    folders, family, mesh, tmp_path
):
    name = family if family == "moe-16b" or mesh == "1x1" else f"{family}-bf16"
    save_state(folders[name], tmp_path / "run", mesh=mesh)
    to_hf(tmp_path / "run", tmp_path / "back")
    assert_same(folders[name], tmp_path / "back")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "moe-16b"])
def test_transformers_computes_the_same_logits_from_the_export(folders, family, tmp_path):
    to_jax(folders[family], tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back", shard_size=100_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    logits = []
    for folder in (folders[family], tmp_path / "back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        tokens = torch.from_numpy(oracle(family).tokens)
        with torch.no_grad():
            logits.append(model(tokens.long()).logits.numpy())
    np.testing.assert_array_equal(logits[0], logits[1])
    scale = oracle(family).logits.std()
    np.testing.assert_allclose(logits[1], oracle(family).logits, atol=1e-5 * scale, rtol=0)


def save_state(folder: Path, run_folder: Path, *, mesh: str) -> None:
    """A run's checkpoint of a fresh training state with the weights of `folder`."""
    with open_hf_folder(folder) as opened:
        plan = plan_import(opened)
        run = RunConfig(model=plan.config, mesh=mesh, batch=3, seq_len=16)
        program = make_program(run, make_mesh(run.mesh_shape))
        layout = attach_bias(program.layout, program.bias_layout)
        params, bias = detach_bias(load_params(plan, layout, mesh=program.mesh))
        source = plan.source
    state = state_from_params(program, params, router_bias=bias)
    metadata = {"model": to_values(run.model), "source": source}
    with CheckpointStore(run_folder / CHECKPOINTS, keep=1) as store:
        store.save(7, state, logical_shapes=program.logical_shapes, metadata=metadata)


def assert_same(first: Path, second: Path) -> None:
    """Equal tensors, of the same names and dtypes; every field of the first config in the second,
    and equal configs of transformers where it has the type.
    """
    ours, theirs = read_all(second), read_all(first)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    original, exported = (json.loads((f / "config.json").read_text()) for f in (first, second))
    assert {key: exported.get(key) for key in original} == original
    if original["model_type"] != "deepseek":
        before, after = (comparable_config(folder) for folder in (first, second))
        assert {key: after[key] for key in before} == before


def comparable_config(folder: Path) -> dict[str, Any]:
    """What transformers reads, without the folder's name and the second name of `rope_type`."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    config["rope_parameters"].pop("type", None)
    return config | {"_name_or_path": ""}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _save_as_bin(state: dict[str, torch.Tensor], folder: Path, *, shards: int) -> None:
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        names = list(state)[i::shards]
        torch.save({name: state[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _write_moe_16b(folder: Path) -> None:
    from safetensors.numpy import save_file

    from convert.hf_config_export import hf_config
    from convert.names import params_from_hf

    reference = oracle("moe-16b")
    params = params_from_hf(reference.config, reference.tensors)
    folder.mkdir()
    tensors = params_to_hf(reference.config, params)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(reference.config, source=None, dtype="F32")
    (folder / "config.json").write_text(json.dumps(config))

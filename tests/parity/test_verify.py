"""`python -m convert verify`, logits: jaxseek on one copy of the weights, transformers on one."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from convert.files.hf_folder import open_hf_folder
from convert.import_plan import plan_import
from convert.to_hf import to_hf
from convert.to_jax import to_jax
from convert.verification import logits
from convert.verification.weight_sources import FolderWeights
from jaxseek.ops import rope
from tests.convert.folders import main_with, write_folder, write_weights
from tests.tiny import TINY

V3_WITH_MTP = dataclasses.replace(TINY["v3"], num_nextn_predict_layers=1)


@pytest.fixture
def verified(monkeypatch, capfd):
    """Exit code, and what is printed about logits."""

    def run(*paths: Path) -> tuple[int, str]:
        code = main_with(monkeypatch, "verify", *paths)
        out, err = capfd.readouterr()
        assert err == ""
        return code, "\n".join(line for line in out.splitlines() if line.startswith("logits"))

    return run


def check_passed(code: int, said: str) -> None:
    assert code == 0, said
    [distance] = re.findall(r"largest difference (\S+) standard deviations", said)
    assert 0 < float(distance) < logits.TOLERANCE, said


def weights_of(folder: Path) -> FolderWeights:
    return FolderWeights(plan_import(open_hf_folder(folder)))


@pytest.mark.parametrize("family", ["coder", "qwen2", "qwen3", "v2-lite"])
def test_a_folder_by_itself(family, tmp_path, verified):
    write_folder(tmp_path, TINY[family], shards=2)
    check_passed(*verified(tmp_path))


def test_shared_experts_of_size_zero_are_not_missed(tmp_path, verified):
    write_folder(tmp_path, dataclasses.replace(TINY["v2-lite"], n_shared_experts=0))
    check_passed(*verified(tmp_path))


@pytest.mark.parametrize("options", [{"dtype": "mixed", "mtp": True}, {"fused": True}])
def test_a_checkpoint_and_the_folder_it_came_from(options, tmp_path, verified):
    write_folder(tmp_path / "hf", V3_WITH_MTP, **options)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    check_passed(*verified(tmp_path / "hf", tmp_path / "jax"))


def test_an_exported_folder_against_its_own_checkpoint_after_fp8(tmp_path, verified):
    write_folder(tmp_path / "hf", V3_WITH_MTP, fp8=True, mtp=True, shards=3)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "bf16")
    check_passed(*verified(tmp_path / "bf16", tmp_path / "jax"))


def test_rounded_weights_are_not_judged_by_their_logits(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["llama"], dtype="F32")
    to_jax(tmp_path / "hf", tmp_path / "jax", dtype="bfloat16")
    code, said = verified(tmp_path / "hf", tmp_path / "jax")
    check_passed(code, said)
    assert f"both with the weights of {tmp_path / 'hf'}, the others are rounded" in said


def test_files_of_torch(tmp_path, verified):
    tensors = write_folder(tmp_path, TINY["llama"], dtype="F32")
    (tmp_path / "model.safetensors").unlink()
    # Some transposed in memory, as a state dict may hold them.
    state = {name: torch.from_numpy(np.ascontiguousarray(t.T)).t() for name, t in tensors.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    check_passed(*verified(tmp_path))
    to_jax(tmp_path, tmp_path / "jax")
    check_passed(*verified(tmp_path, tmp_path / "jax"))


def test_a_config_that_still_says_quantised_is_not_believed(tmp_path, verified):
    write_folder(tmp_path, TINY["llama"])
    file = tmp_path / "config.json"
    block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": block}))
    check_passed(*verified(tmp_path))


def test_a_head_with_permuted_rotary_columns_is_found(tmp_path, capfd):
    config = TINY["v3"]
    tensors = write_folder(tmp_path / "right", config)
    write_folder(tmp_path / "wrong", config)
    name = "model.layers.1.self_attn.q_b_proj.weight"
    heads = tensors[name].reshape(config.num_attention_heads, config.attention_head_dim, -1)
    rotated = heads[2, config.qk_nope_head_dim :]
    rotated[:] = rotated[[0, 2, 1, 3]]  # pairs of neighbours for halves
    write_weights(tmp_path / "wrong", tensors)
    right, wrong = weights_of(tmp_path / "right"), weights_of(tmp_path / "wrong")
    assert logits.check_logits(right, right)
    assert not logits.check_logits(right, wrong)
    assert "of the positions, in 8 of 8 sequences" in capfd.readouterr().out


def test_rotary_angles_that_are_wrong_from_position_64_on_are_found(
    tmp_path, verified, monkeypatch
):
    write_folder(tmp_path, TINY["llama"])
    original = rope.rope_tables

    def wrong(positions, config):
        return original(positions.clip(max=63), config)

    monkeypatch.setattr("jaxseek.model.rope_tables", wrong)
    code, said = verified(tmp_path)
    assert code == 1
    assert "8 of 8 sequences, from position 64 on" in said


def test_moe_16b_has_no_class(tmp_path, verified):
    write_folder(tmp_path, TINY["moe-16b"])
    code, said = verified(tmp_path)
    assert code == 0
    assert "transformers has no class for model_type 'deepseek'" in said


def test_a_file_under_another_name_is_not_found_by_transformers(tmp_path, verified):
    write_folder(tmp_path, TINY["llama"])
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    code, said = verified(tmp_path)
    assert code == 0
    assert "transformers looks for model.safetensors or an index" in said


def test_too_little_memory_is_said_before_anything_is_loaded(tmp_path, verified, monkeypatch):
    monkeypatch.setattr(logits, "total_memory", lambda: 10**9)
    monkeypatch.setattr(logits, "_load", lambda path: pytest.fail("was loaded"))
    write_folder(tmp_path, TINY["llama"])
    code, said = verified(tmp_path)
    assert code == 0
    assert "in float32 this needs 1.1 GB of memory, this machine has 1.0 GB" in said


def test_a_folder_that_transformers_cannot_load_fails(tmp_path, verified):
    write_folder(tmp_path, TINY["llama"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": "not a mapping"}))
    code, said = verified(tmp_path)
    assert code == 1
    assert f"transformers cannot load {tmp_path}: " in said


def test_a_tensor_that_transformers_does_not_find_is_never_random(tmp_path):
    tensors = write_folder(tmp_path, TINY["llama"])
    del tensors["lm_head.weight"]
    write_weights(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"no values for lm_head\.weight"):
        logits._load(tmp_path)

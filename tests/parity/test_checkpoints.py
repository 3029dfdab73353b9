"""Files written by transformers and torch, and the tensors transformers holds in memory."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.hf_config import model_config_from_hf
from convert.names import params_from_hf, params_to_hf
from jaxseek.layout import flatten_paths
from tests.parity.oracle import FAMILIES, build, oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_go_back_to_those_transformers_holds(family):
    reference = oracle(family)
    params = params_from_hf(reference.config, reference.tensors)
    back = params_to_hf(reference.config, params, experts="fused")
    assert back.keys() == reference.tensors.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, reference.tensors[name], err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2-distill", "v2", "v3"])
def test_saved_file_per_expert_and_fused_in_memory_give_equal_parameters(family, tmp_path):
    model, config = build(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    held = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.is_moe:
        assert "model.layers.1.mlp.experts.0.gate_proj.weight" in saved
        assert "model.layers.1.mlp.experts.gate_up_proj" in held
    assert model_config_from_hf(json.loads((tmp_path / "config.json").read_text())) == config
    from_file = flatten_paths(params_from_hf(config, saved))
    from_memory = flatten_paths(params_from_hf(config, held))
    assert from_file.keys() == from_memory.keys()
    for path, leaf in from_file.items():
        np.testing.assert_array_equal(leaf, from_memory[path], err_msg=path)
    back = params_to_hf(config, params_from_hf(config, saved))
    assert back.keys() == saved.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, saved[name], err_msg=name)

"""The benchmark measures against a model of the same size."""

import pytest
import torch
import transformers

from jaxseek.bench.pytorch_reference import _hf_config
from jaxseek.model import parameter_count
from jaxseek.presets import load_preset


@pytest.mark.parametrize("preset", ["bench-dense-58m", "bench-v2-167m", "bench-v3-164m"])
def test_both_sides_have_the_same_number_of_parameters(preset):
    config = load_preset(preset)
    name, hf_config = _hf_config(config)
    with torch.device("meta"):
        reference = getattr(transformers, name)(hf_config)
    biases = sum(b.numel() for n, b in reference.named_buffers() if "correction_bias" in n)
    assert sum(p.numel() for p in reference.parameters()) + biases == parameter_count(config)

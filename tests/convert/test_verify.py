"""`python -m convert verify`, tensors: what counts as equal, and what is said where they are not.

Logits against transformers are in tests/parity; how they are judged is here.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert import checkpoint_source
from convert.files.dtypes import NUMPY
from convert.to_hf import to_hf
from convert.to_jax import to_jax
from convert.verification import logits, weight_sources
from jaxseek.config import ModelConfig
from tests.convert.folders import INDEX, main_with, write_folder, write_weights
from tests.tiny import TINY

V3_WITH_MTP = dataclasses.replace(TINY["v3"], num_nextn_predict_layers=1)
QUERY = "model.layers.1.self_attn.q_b_proj.weight"
MTP_NAME = "model.layers.2.eh_proj.weight"


@pytest.fixture
def verified(monkeypatch, capfd):
    """Exit code and stdout of `verify` without logits; nothing may be on stderr."""

    def run(*paths: Path) -> tuple[int, str]:
        code = main_with(monkeypatch, "verify", *paths, "--no-logits")
        out, err = capfd.readouterr()
        assert err == ""
        return code, out

    return run


@pytest.fixture(params=["whole tensors", "small blocks"])
def block_size(request, monkeypatch):
    """Everything is read at once, or a few rows at a time."""
    if request.param == "small blocks":
        monkeypatch.setattr(weight_sources, "_BLOCK_BYTES", 333)
        monkeypatch.setattr(checkpoint_source, "_BLOCK_BYTES", 777)


def change(folder: Path, name: str, change_values) -> None:
    """Write the folder's one weight file anew, with other values of a tensor."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].copy()
    change_values(tensors[name].reshape(-1))
    write_weights(folder, tensors)


def flip_lowest_bit(values: np.ndarray) -> None:
    values.view(f"u{values.itemsize}")[5] ^= 1


# A folder by itself


@pytest.mark.parametrize("options", [{}, {"fp8": True, "mtp": True, "shards": 3}, {"fused": True}])
def test_a_whole_folder_passes(options, tmp_path, verified, block_size):
    write_folder(tmp_path, V3_WITH_MTP, **options)
    code, out = verified(tmp_path)
    assert code == 0
    assert "tensors of the model are there" in out
    assert ("and 44 of MTP layers" in out) == ("mtp" in options)
    assert "All values are finite." in out


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_values_that_are_not_finite_are_counted(dtype, tmp_path, verified, block_size):
    tensors = write_folder(tmp_path, TINY["llama"], dtype="BF16")
    for name, values in (("model.norm.weight", [np.nan]), ("lm_head.weight", [np.inf, -np.inf])):
        array = np.array(tensors[name]).astype(np.float64)
        array.reshape(-1)[3 : 3 + len(values)] = values
        tensors[name] = array.astype(NUMPY[dtype])
    write_weights(tmp_path, tensors)
    code, out = verified(tmp_path)
    assert code == 1
    assert "not finite: 2" in out
    assert "model.norm.weight: 1 infinite or not a number" in out
    assert "lm_head.weight: 2 infinite or not a number" in out


def test_a_scale_that_is_not_finite_spoils_its_block(tmp_path, verified):
    tensors = write_folder(tmp_path, TINY["v3"], fp8=True)
    tensors[f"{QUERY}_scale_inv"][0, 0] = np.inf
    write_weights(tmp_path, tensors)
    code, out = verified(tmp_path)
    assert code == 1
    assert f"{QUERY}: " in out


def test_a_correction_bias_that_is_not_finite_is_refused(tmp_path, monkeypatch, capfd):
    tensors = write_folder(tmp_path, TINY["v3"])
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][2] = np.nan
    write_weights(tmp_path, tensors)
    assert main_with(monkeypatch, "verify", tmp_path) == 2
    assert "e_score_correction_bias: has values that are not finite" in capfd.readouterr().err


# Against a checkpoint or another folder


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TINY["coder-mqa"], {"shards": 2}),
        (TINY["qwen2"], {"dtype": "F16"}),
        (TINY["qwen3"], {"dtype": "F32"}),
        (TINY["v2-lite"], {"dtype": "mixed"}),
        (V3_WITH_MTP, {"mtp": True}),
        (V3_WITH_MTP, {"mtp": True, "fp8": True, "shards": 3}),
        (TINY["v3"], {"fused": True}),
    ],
)
def test_conversion_there_and_back_is_equal(config, options, tmp_path, verified, block_size):
    write_folder(tmp_path / "hf", config, **options)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back")
    for other in ("jax", "back"):
        code, out = verified(tmp_path / "hf", tmp_path / other)
        assert code == 0
        assert "are equal bit for bit." in out
        assert "not compared" not in out


def test_experts_in_one_tensor_or_in_many_are_the_same(tmp_path, verified):
    write_folder(tmp_path / "fused", TINY["v2"], fused=True)
    to_jax(tmp_path / "fused", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "separate")
    assert (tmp_path / "separate" / "model.safetensors").exists()
    assert verified(tmp_path / "separate", tmp_path / "fused")[0] == 0
    change(
        tmp_path / "fused",
        "model.layers.1.mlp.experts.gate_up_proj",
        lambda values: flip_lowest_bit(values[3 * 2 * 12 * 40 + 12 * 40 :]),
    )
    code, out = verified(tmp_path / "separate", tmp_path / "fused")
    assert code == 1
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in out
    assert "1 of 52 tensors differ" in out


@pytest.mark.parametrize(
    ("stored", "dtype", "says"),
    [
        ("F32", "bfloat16", "equal once rounded"),
        ("F16", "bfloat16", "equal once rounded"),
        ("BF16", "float32", "equal bit for bit"),
        ("mixed", "float32", "equal bit for bit"),
    ],
)
def test_other_dtypes_are_compared_as_they_round(stored, dtype, says, tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["v3"], dtype=stored)
    to_jax(tmp_path / "hf", tmp_path / "jax", dtype=dtype)
    code, out = verified(tmp_path / "hf", tmp_path / "jax")
    assert code == 0
    assert says in out
    assert ("have a narrower dtype" in out) == ("once" in says)


def test_a_wrong_rounding_is_found(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["llama"], dtype="F32")
    to_jax(tmp_path / "hf", tmp_path / "jax", dtype="bfloat16")
    to_hf(tmp_path / "jax", tmp_path / "other")
    change(tmp_path / "other", "lm_head.weight", flip_lowest_bit)
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    assert "1 of 21 tensors differ" in out


def test_fp8_as_float32_may_be_exact_or_rounded_on_the_way(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["v3"], fp8=True)
    to_jax(tmp_path / "hf", tmp_path / "exact", dtype="float32")
    to_jax(tmp_path / "hf", tmp_path / "rounded")
    to_hf(tmp_path / "rounded", tmp_path / "rounded_f32", dtype="float32")
    for other in ("exact", "rounded", "rounded_f32"):
        code, out = verified(tmp_path / "hf", tmp_path / other)
        assert (code, "equal bit for bit" in out) == (0, True)
    change(tmp_path / "rounded_f32", QUERY, flip_lowest_bit)
    code, out = verified(tmp_path / "hf", tmp_path / "rounded_f32")
    assert code == 1
    assert "1 of 53 tensors differ" in out


def test_one_changed_bit_is_found_and_named(tmp_path, verified, block_size):
    write_folder(tmp_path / "hf", TINY["v3"])
    write_folder(tmp_path / "other", TINY["v3"])
    change(tmp_path / "other", QUERY, flip_lowest_bit)
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    [row] = [line.split() for line in out.splitlines() if line.strip().startswith(QUERY)]
    assert row[1:3] == ["672", "1"]
    assert 0 < float(row[3]) < 1e-2
    assert "1 of 53 tensors differ" in out


def test_the_sign_of_a_zero_is_a_difference(tmp_path, verified):
    for name, zero in (("hf", 0.0), ("other", -0.0)):
        write_folder(tmp_path / name, TINY["llama"])
        change(tmp_path / name, "model.norm.weight", lambda values, zero=zero: values.fill(zero))
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    [row] = [line.split() for line in out.splitlines() if "norm.weight " in line]
    assert row == ["model.norm.weight", "40", "40", "0"]


def test_a_flipped_bit_in_a_checkpoint_is_called_damage(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["v3"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    step = tmp_path / "jax" / "checkpoints" / "0"
    parts = step / "state" / "params.moe_layers.self_attn.q_b_proj.kernel" / "c"
    [file] = [path for path in parts.rglob("*") if path.is_file()]
    data = bytearray(file.read_bytes())
    data[11] ^= 0x10
    file.write_bytes(data)
    code, out = verified(tmp_path / "hf", tmp_path / "jax")
    assert code == 1
    assert QUERY in out
    assert "It is damaged: state/params.moe_layers.self_attn.q_b_proj.kernel" in out


def test_trained_weights_are_counted(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["llama"], seed=1)
    write_folder(tmp_path / "other", TINY["llama"], seed=2)
    to_jax(tmp_path / "other", tmp_path / "jax")
    code, out = verified(tmp_path / "hf", tmp_path / "jax")
    assert code == 1
    assert "21 of 21 tensors differ" in out
    assert "and 1 more" in out  # of 20 that are shown
    assert "after training, differences are to be expected" in out


def test_other_layers_are_missing_or_extra(tmp_path, verified):
    small, large = (dataclasses.replace(TINY["llama"], num_hidden_layers=n) for n in (2, 3))
    write_folder(tmp_path / "small", small)
    write_folder(tmp_path / "large", large)
    code, out = verified(tmp_path / "large", tmp_path / "small")
    assert code == 1
    assert f"num_hidden_layers: 3 in {tmp_path / 'large'}, 2 in" in out
    assert f"Not in {tmp_path / 'small'}: 9\n  model.layers.2." in out
    code, out = verified(tmp_path / "small", tmp_path / "large")
    assert code == 1
    assert f"Only in {tmp_path / 'large'}: 9\n  model.layers.2." in out


def test_other_shapes_are_named(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["llama"])
    write_folder(tmp_path / "other", dataclasses.replace(TINY["llama"], intermediate_size=45))
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    assert "layers.0.mlp.up_proj.weight, in the shape (44, 40): there it is (45, 40)" in out


def test_equal_weights_under_another_config_are_another_model(tmp_path, verified):
    write_folder(tmp_path / "hf", TINY["llama"])
    write_folder(tmp_path / "other", dataclasses.replace(TINY["llama"], rope_theta=5e4))
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    assert "rope_theta: 10000.0 in" in out
    assert "are equal bit for bit" in out


def test_an_export_of_a_model_without_a_source_has_the_same_config(tmp_path, verified):
    # What it was initialised with and the default size of a head are not read from a config.json.
    config = dataclasses.replace(TINY["llama"], initializer_range=0.3, head_dim=8)
    write_folder(tmp_path / "hf", config)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    file = tmp_path / "jax" / "checkpoints" / "0" / "jaxseek.json"
    manifest = json.loads(file.read_text())
    manifest["metadata"]["model"] |= {"initializer_range": 0.3, "head_dim": None}
    manifest["metadata"]["source"] = None
    file.write_text(json.dumps(manifest))
    assert verified(tmp_path / "hf", tmp_path / "jax")[0] == 0


@pytest.mark.parametrize("holder", ["hf", "other"])
def test_mtp_layers_on_one_side_only_are_not_compared(holder, tmp_path, verified):
    for name in ("hf", "other"):
        write_folder(tmp_path / name, V3_WITH_MTP, mtp=name == holder)
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 0
    assert f"44 tensors of MTP layers are in {tmp_path / holder} only: not compared." in out
    assert "53 tensors in" in out


def test_a_changed_or_lost_mtp_tensor_is_found(tmp_path, verified):
    write_folder(tmp_path / "hf", V3_WITH_MTP, mtp=True)
    write_folder(tmp_path / "other", V3_WITH_MTP, mtp=True)
    change(tmp_path / "other", MTP_NAME, flip_lowest_bit)
    to_jax(tmp_path / "other", tmp_path / "jax")
    for other in ("other", "jax"):
        code, out = verified(tmp_path / "hf", tmp_path / other)
        assert code == 1
        assert MTP_NAME in out
        assert "1 of 97 tensors differ" in out
    tensors = _read(tmp_path / "hf")
    del tensors[MTP_NAME]
    write_weights(tmp_path / "other", tensors)
    code, out = verified(tmp_path / "hf", tmp_path / "other")
    assert code == 1
    assert f"Not in {tmp_path / 'other'}: 1\n  {MTP_NAME}" in out


def test_other_must_be_a_model(tmp_path, monkeypatch, capfd):
    write_folder(tmp_path / "hf", TINY["llama"])
    (tmp_path / "empty").mkdir()
    for other, message in (("absent", "no such folder"), ("empty", "no complete checkpoint")):
        code = main_with(monkeypatch, "verify", tmp_path / "hf", tmp_path / other)
        out, err = capfd.readouterr()
        assert (code, out) == (2, "")
        assert message in err
    write_folder(tmp_path / "two", TINY["llama"], shards=2)
    (tmp_path / "two" / "model-00002-of-00002.safetensors").unlink()
    assert main_with(monkeypatch, "verify", tmp_path / "hf", tmp_path / "two") == 2
    assert INDEX in capfd.readouterr().err


def test_logits_are_not_compared_where_tensors_differ(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("convert.verify.check_logits", lambda *_: pytest.fail("were compared"))
    write_folder(tmp_path / "hf", TINY["llama"])
    write_folder(tmp_path / "other", TINY["llama"], seed=1)
    assert main_with(monkeypatch, "verify", tmp_path / "hf", tmp_path / "other") == 1
    assert "logits: not compared, for the weights differ" in capfd.readouterr().out


def test_fp8_logits_are_left_to_the_exported_folder(tmp_path, monkeypatch, capfd):
    write_folder(tmp_path, TINY["v3"], fp8=True)
    assert main_with(monkeypatch, "verify", tmp_path) == 0
    assert "Export them with to-jax and to-hf" in capfd.readouterr().out


def test_logits_need_torch(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(logits.importlib.util, "find_spec", lambda name: None)
    write_folder(tmp_path, TINY["llama"])
    assert main_with(monkeypatch, "verify", tmp_path) == 0
    assert "logits: not compared: torch is not installed." in capfd.readouterr().out


@pytest.mark.parametrize(("config", "tolerated"), [(TINY["llama"], 0), (TINY["v3"], 2)])
def test_of_experts_few_sequences_may_differ(config: ModelConfig, tolerated, capfd):
    theirs = np.random.default_rng(0).standard_normal((8, 80, 5)).astype(np.float32)
    for sequences in range(5):
        ours = theirs.copy()
        ours[:sequences, 70:] += 1e-3
        passed = logits._verdict(ours, theirs, moe=config.is_moe)
        assert passed == (sequences <= tolerated)
        out = capfd.readouterr().out
        if sequences:
            assert f"in {sequences} of 8 sequences, from position 70 on" in out
            assert ("accepted" in out) == passed


def test_logits_that_are_no_numbers_never_pass():
    theirs = np.random.default_rng(0).standard_normal((8, 80, 5)).astype(np.float32)
    ours = theirs.copy()
    ours[:, 79, 4] = np.nan
    assert not logits._verdict(ours, theirs, moe=True)


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path):
    # One of 160 MB, mapped on both sides: what was read must be let go of before more is.
    config = dataclasses.replace(TINY["coder"], vocab_size=2_000_000, tie_word_embeddings=True)
    write_folder(tmp_path / "hf", config)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    # Not ru_maxrss: a process inherits that of the one that started it.
    program = f"""
from pathlib import Path
from convert.verify import verify
def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
assert verify(Path({str(tmp_path / "hf")!r}), Path({str(tmp_path / "jax")!r}), logits=False)
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[-1]) < 120e6, result.stdout


def _read(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")

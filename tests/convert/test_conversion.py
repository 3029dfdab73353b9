"""`to-jax` and `to-hf` on folders written without torch; tests/parity has those of transformers."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from convert import pipeline
from convert import to_jax as to_jax_module
from convert.files.dequant import dequantise
from convert.files.hf_folder import open_hf_folder
from convert.names import params_from_hf, params_to_hf
from convert.to_hf import parse_size, plan_shards, to_hf
from convert.to_jax import to_jax
from jaxseek.checkpoint_files import ARRAYS_FOLDER, incompleteness
from jaxseek.errors import UserError
from jaxseek.layout import flatten_paths
from jaxseek.paths import CHECKPOINTS, HF_FILES
from tests.convert.folders import FP8_BLOCK, with_vocabulary, write_folder, write_weights
from tests.tiny import TINY

V3 = dataclasses.replace(TINY["v3"], num_hidden_layers=3, num_nextn_predict_layers=1)
BF16 = np.dtype(ml_dtypes.bfloat16)


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    with open_hf_folder(folder) as opened:
        return {name: np.array(opened.view(name)) for name in opened.tensors}


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert ours[name].tobytes() == tensor.tobytes(), name


def there_and_back(folder: Path, tmp_path: Path, **options) -> dict[str, np.ndarray]:
    to_jax(folder, tmp_path / "jax", **options)
    to_hf(tmp_path / "jax", tmp_path / "back")
    return read_folder(tmp_path / "back")


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "mixed"])
@pytest.mark.parametrize("family", TINY)
def test_every_family_comes_back_bit_for_bit(family, dtype, tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY[family], dtype=dtype, shards=2)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


@pytest.mark.parametrize("family", ["moe-16b", "v3"])
def test_fused_experts_convert_as_separate_ones_do(family, tmp_path):
    separate = write_folder(tmp_path / "separate", TINY[family])
    params = params_from_hf(TINY[family], separate)
    fused = params_to_hf(TINY[family], params, experts="fused")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes(
        (tmp_path / "separate" / "config.json").read_bytes()
    )
    write_weights(tmp_path / "hf", fused)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), separate)


def test_experts_that_come_fused_keep_their_dtype_where_others_have_another(tmp_path):
    separate = write_folder(tmp_path / "separate", TINY["v3"], dtype="F32")
    fused = write_folder(tmp_path / "hf", TINY["v3"], dtype="F32", fused=True)
    for tensors, folder in ((separate, "separate"), (fused, "hf")):
        for name in tensors:
            if ".mlp.experts." in name:
                tensors[name] = tensors[name].astype(BF16)
        write_weights(tmp_path / folder, tensors)
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in separate.items()}


def test_a_chunk_on_disk_is_the_tensor_of_the_file(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    arrays = tmp_path / "jax" / CHECKPOINTS / "0" / ARRAYS_FOLDER
    for chunk, name in {
        "params.moe_layers.mlp.experts.down_proj/c/1/5/0/0": (
            "model.layers.2.mlp.experts.5.down_proj.weight"
        ),
        "params.moe_layers.self_attn.q_b_proj.kernel/c/0/0/0/0": (
            "model.layers.1.self_attn.q_b_proj.weight"
        ),
        "params.dense_layers.self_attn.o_proj.kernel/c/0/0/0/0": (
            "model.layers.0.self_attn.o_proj.weight"
        ),
        "router_bias/c/1/0": "model.layers.2.mlp.gate.e_score_correction_bias",
    }.items():
        assert (arrays / chunk).read_bytes() == tensors[name].tobytes()


def test_orbax_restores_what_was_converted(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    restored = ocp.PyTreeCheckpointer().restore(
        tmp_path / "jax" / CHECKPOINTS / "0" / ARRAYS_FOLDER
    )
    expected = flatten_paths(params_from_hf(V3, tensors))
    bias = expected.pop("moe_layers.mlp.gate.e_score_correction_bias")
    np.testing.assert_array_equal(restored.pop("router_bias"), bias)
    assert restored.keys() == {f"params.{path}" for path in expected}
    for path, leaf in expected.items():
        np.testing.assert_array_equal(restored[f"params.{path}"], leaf, err_msg=path)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_fp8_becomes_the_product_with_its_scale_wherever_that_stands(dtype, tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, fp8=True, shards=3)
    choice = {"BF16": "keep", "F32": "float32"}[dtype]
    back = there_and_back(tmp_path / "hf", tmp_path, dtype=choice)
    scaled = [name for name in tensors if name + "_scale_inv" in tensors]
    assert len(scaled) > 50
    for name in scaled:
        scale = tensors[name + "_scale_inv"]
        expected = (
            tensors[name].astype(np.float32)
            * np.repeat(np.repeat(scale, FP8_BLOCK[0], axis=0), FP8_BLOCK[1], axis=1)[
                : tensors[name].shape[0], : tensors[name].shape[1]
            ]
        )
        expected = expected.astype(BF16) if dtype == "BF16" else expected
        assert back[name].tobytes() == expected.tobytes(), name
    assert back.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_fp8_without_its_scale_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, fp8=True)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[name + "_scale_inv"]
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, rf"{name}: FP8, and {name}_scale_inv is missing")


def test_a_scale_of_another_shape_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, fp8=True)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"][:1]
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, rf"{name}_scale_inv: shape \(1, 2\).*blocks of 16 x 24 needs \(2, 2\)")


def test_a_scale_left_behind_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, r"up_proj.weight_scale_inv: a scale without an FP8 tensor")


def test_a_quantisation_that_config_json_only_claims_is_not_believed_nor_written(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    edit_config(
        tmp_path / "hf",
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    summary = to_jax(tmp_path / "hf", tmp_path / "jax")
    assert any("the tensors are believed" in note for note in summary.notes)
    to_hf(tmp_path / "jax", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert_same_bits(read_folder(tmp_path / "back"), tensors)


@pytest.mark.parametrize("fp8", [False, True])
def test_mtp_layers_are_kept_for_the_way_back(fp8, tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, mtp=True, fp8=fp8, shards=2)
    summary = to_jax(tmp_path / "hf", tmp_path / "jax")
    mtp = {name for name in tensors if name.startswith("model.layers.3.") and "_scale" not in name}
    assert len(mtp) > 30
    assert f"{len(mtp)} tensors of MTP layers (from layer 3 on)" in "\n".join(summary.notes)
    to_hf(tmp_path / "jax", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert back.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name in mtp:
        expected = tensors[name]
        if scale := tensors.get(name + "_scale_inv") is not None:
            scale = tensors[name + "_scale_inv"]
            expected = dequantise(expected, scale, block=FP8_BLOCK, dtype="BF16")
        assert back[name].tobytes() == expected.tobytes(), name


def test_mtp_layers_that_only_config_json_names_are_no_loss(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    summary = to_jax(tmp_path / "hf", tmp_path / "jax")
    assert any("the files hold none" in note for note in summary.notes)
    to_hf(tmp_path / "jax", tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), tensors)


def test_a_layer_beyond_the_mtp_layers_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, mtp=True)
    tensors["model.layers.4.enorm.weight"] = np.ones(40, np.float32)
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, "model.layers.4.enorm.weight: not a tensor of this model")


def test_routers_and_their_biases_are_never_narrowed(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, dtype="F32")
    back = there_and_back(tmp_path / "hf", tmp_path, dtype="bfloat16")
    for name, tensor in back.items():
        if ".mlp.gate." in name:
            assert tensor.tobytes() == tensors[name].tobytes(), name
        else:
            assert tensor.tobytes() == tensors[name].astype(BF16).tobytes(), name
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_float32_and_back_to_bfloat16_is_exact(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, dtype="BF16")
    to_jax(tmp_path / "hf", tmp_path / "jax", dtype="float32")
    to_hf(tmp_path / "jax", tmp_path / "wide")
    assert {tensor.dtype for tensor in read_folder(tmp_path / "wide").values()} == {
        np.dtype(np.float32)
    }
    to_hf(tmp_path / "jax", tmp_path / "back", dtype="bfloat16")
    back = read_folder(tmp_path / "back")
    for name, tensor in tensors.items():
        assert np.array_equal(back[name].astype(np.float32), tensor.astype(np.float32)), name


def test_a_head_is_asked_for_where_config_json_does_not_tie_it(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    del tensors["lm_head.weight"]
    write_weights(tmp_path / "hf", tensors)
    refused(
        tmp_path,
        "lm_head.weight: a model .* says tie_word_embeddings: true.*\nlm_head.weight: missing",
    )
    edit_config(tmp_path / "hf", tie_word_embeddings=True)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path):
    tied = dataclasses.replace(TINY["llama"], tie_word_embeddings=True)
    tensors = write_folder(tmp_path / "hf", tied)
    embedding = tensors["model.embed_tokens.weight"]
    write_weights(tmp_path / "hf", tensors | {"lm_head.weight": embedding})
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)
    write_weights(tmp_path / "hf", tensors | {"lm_head.weight": -embedding})
    refused(tmp_path, "lm_head.weight: differs from model.embed_tokens.weight", out="other")


def test_a_correction_bias_that_is_not_finite_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name][3] = np.nan
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, f"{name}: has values that are not finite")


def test_rotary_buffers_of_old_files_are_left_out_with_a_word(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in (0, 1)
    }
    write_weights(tmp_path / "hf", tensors | buffers)
    summary = to_jax(tmp_path / "hf", tmp_path / "jax")
    assert any(note.startswith("2 rotary_emb.inv_freq buffers") for note in summary.notes)
    to_hf(tmp_path / "jax", tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), tensors)


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e5m2])
def test_dtypes_that_are_no_parameter_are_refused_and_float64_is_kept(dtype, tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    write_weights(tmp_path / "hf", tensors)
    if dtype is np.float64:
        assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)
    else:
        refused(tmp_path, rf"{name}: dtype (I8|F8_E5M2); parameters are F16, BF16, F32, F64")


def test_all_problems_come_in_one_message_that_names_the_folder(tmp_path):
    tensors = write_folder(tmp_path / "hf", V3, fp8=True)
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"]
    tensors["model.layers.2.mlp.experts.1.w2.weight"] = tensors.pop(
        "model.layers.2.mlp.experts.1.down_proj.weight"
    )
    tensors["model.embed_tokens.weight"] = np.zeros((131, 40), np.int16)
    write_weights(tmp_path / "hf", tensors)
    with pytest.raises(UserError) as error:
        to_jax(tmp_path / "hf", tmp_path / "jax")
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{tmp_path / 'hf'}: ")
    assert "problems: 7" in first
    assert len(lines) == 7
    assert lines == sorted(lines)


def test_an_unsupported_model_is_refused_by_name(tmp_path):
    write_folder(tmp_path / "hf", V3)
    edit_config(tmp_path / "hf", model_type="deepseek_v32")
    refused(tmp_path, "DeepSeek-V3.2")


def test_files_travel_along_and_config_json_is_whole(tmp_path):
    config = with_vocabulary(TINY["llama"])
    write_folder(tmp_path / "hf", config, tokenizer=True)
    edit_config(tmp_path / "hf", architectures=None, _name_or_path="somewhere", eos_token_id=[1, 7])
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "hf" / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "hf" / "LICENSE-MODEL").write_text("terms")
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back", shard_size=20_000)
    carried = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE-MODEL")
    for name in (*carried, "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
        assert (tmp_path / "jax" / HF_FILES / name).exists()
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    original = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert {key: written[key] for key in original} == original
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 2
    tensors = read_folder(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_a_generation_config_is_written_where_none_came_along(tmp_path):
    write_folder(tmp_path / "hf", V3)
    edit_config(tmp_path / "hf", bos_token_id=0, eos_token_id=1)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (0, 1)


def test_shards_keep_to_their_size_but_for_one_larger_tensor():
    tensors = {
        name: ("BF16", (size,)) for name, size in zip("abcdef", (3, 2, 9, 1, 1, 4), strict=True)
    }
    shards = plan_shards(tensors, shard_size=10)
    assert list(shards.values()) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert list(shards)[1] == "model-00002-of-00004.safetensors"
    assert plan_shards(tensors, shard_size=40) == {"model.safetensors": list("abcdef")}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("4GiB", 2**32), ("500 mb", 5 * 10**8), ("1.5GB", 15 * 10**8), ("7", 7)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5GX", "0.1", "1e9", "5 G B"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(UserError, match="is no size; give one such as 5GB"):
        parse_size(text)


def test_large_tensors_go_in_blocks_and_small_ones_do_not_wait_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint_source._BLOCK_BYTES", 1000)
    monkeypatch.setattr(pipeline, "_BYTES_IN_FLIGHT", 3000)
    monkeypatch.setattr(to_jax_module, "_BLOCK", 512)
    tensors = write_folder(tmp_path / "hf", V3, mtp=True)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


@pytest.mark.parametrize("existing", ["a file", "a folder with something in it"])
def test_nothing_is_ever_overwritten(existing, tmp_path):
    write_folder(tmp_path / "hf", TINY["llama"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    out = tmp_path / "out"
    if existing == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").touch()
    for convert, source in ((to_jax, "hf"), (to_hf, "jax")):
        with pytest.raises(UserError, match="exists already; nothing is ever overwritten"):
            convert(tmp_path / source, out)
    assert (
        out.read_text() == "mine" if out.is_file() else [p.name for p in out.iterdir()] == ["mine"]
    )


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    (tmp_path / "jax").mkdir()
    (tmp_path / "back").mkdir()
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


@pytest.mark.parametrize("command", ["to-jax", "to-hf"])
def test_a_disk_that_fills_up_leaves_nothing_behind(command, tmp_path, monkeypatch):
    write_folder(tmp_path / "hf", TINY["llama"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    written = 0

    def full(descriptor, data, *offset):
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, *offset)

    import os

    write = os.write if command == "to-jax" else os.pwrite
    monkeypatch.setattr(os, "write" if command == "to-jax" else "pwrite", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match="No space left on device"):
        if command == "to-jax":
            to_jax(tmp_path / "hf", tmp_path / "out")
        else:
            to_hf(tmp_path / "jax", tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_too_little_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    write_folder(tmp_path / "hf", TINY["llama"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    refused(tmp_path, r"needs [\d,]+ bytes, and its disk has 5 free")


def test_the_rest_of_an_interrupted_conversion_is_named(tmp_path):
    write_folder(tmp_path / "hf", TINY["llama"])
    (tmp_path / "jax.partial").mkdir()
    with pytest.raises(UserError, match=r"jax\.partial is there, from a conversion that was int"):
        to_jax(tmp_path / "hf", tmp_path / "jax")


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    write_folder(tmp_path / "hf", V3)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    step = tmp_path / "jax" / CHECKPOINTS / "0"
    chunk = step / ARRAYS_FOLDER / "params.moe_layers.mlp.experts.up_proj/c/0/3/0/0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(UserError, match=r"have changed since they were written: state/params\.moe"):
        to_hf(tmp_path / "jax", tmp_path / "back")
    chunk.unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        to_hf(tmp_path / "jax", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_converted_folder_is_a_complete_checkpoint(tmp_path):
    write_folder(tmp_path / "hf", V3, mtp=True)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    assert incompleteness(tmp_path / "jax" / CHECKPOINTS / "0") is None


@pytest.mark.parametrize("given", ["jax", "jax/checkpoints", "jax/checkpoints/0"])
def test_a_checkpoint_is_found_from_any_of_its_folders(given, tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / given, tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), tensors)


def test_what_is_no_checkpoint_is_refused_with_what_it_is(tmp_path):
    write_folder(tmp_path / "hf", TINY["llama"])
    (tmp_path / "empty").mkdir()
    for path, message in {
        "hf": "It looks like a Hugging Face folder; to-jax and --model take that",
        "empty": "holds no complete checkpoint of jaxseek. Complete steps: none",
        "nowhere": "there is no such folder",
    }.items():
        with pytest.raises(UserError, match=message):
            to_hf(tmp_path / path, tmp_path / "back")


def refused(tmp_path: Path, message: str, *, out: str = "refused") -> None:
    """`to-jax` of `hf` raises a `UserError` that says `message`, and leaves nothing behind."""
    with pytest.raises(UserError, match=f"(?s){message}"):
        to_jax(tmp_path / "hf", tmp_path / out)
    assert not list(tmp_path.glob(f"{out}*"))


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys of `config.json`; `None` takes one away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

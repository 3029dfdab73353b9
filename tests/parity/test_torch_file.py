"""The reader of torch.save's files against what torch writes and reads."""

import math

import numpy as np
import pytest
import torch

from convert.files.dtypes import NUMPY
from convert.files.hf_folder import open_hf_folder
from convert.files.tensor_info import TensorInfo
from convert.files.torch_file import read_torch_file
from jaxseek.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def values(info: TensorInfo) -> torch.Tensor:
    """The tensor at the place where a `TensorInfo` says it lies."""
    data = bytearray(info.file.read_bytes()[info.offset :])
    dtype = DTYPES[info.dtype]
    if not math.prod(info.shape):
        return torch.empty(info.shape, dtype=dtype)
    flat = torch.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
    if info.strides is None:
        return flat[: math.prod(info.shape)].reshape(info.shape)
    return flat.as_strided(info.shape, info.strides)


def assert_reads_as_torch_does(path, names=None) -> dict[str, TensorInfo]:
    # Its restricted reader knows protocol 2 only; the test wrote the file itself.
    expected = torch.load(path, weights_only=False)
    expected = expected[names] if names else expected
    infos = read_torch_file(path)
    assert list(infos) == list(expected)
    for name, tensor in expected.items():
        info = infos[name]
        assert (info.shape, DTYPES[info.dtype]) == (tuple(tensor.shape), tensor.dtype), name
        assert torch.equal(bits(values(info)), bits(tensor)), name
    return infos


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, because torch compares no NaN and few of its dtypes of 8 bits."""
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def test_every_dtype_is_read(tmp_path):
    assert DTYPES.keys() == NUMPY.keys()
    torch.manual_seed(0)
    state = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (5, 8), dtype=torch.uint8)
        state[name] = raw.view(dtype)
        state[f"{name} transposed"] = state[name].t()
    torch.save(state, tmp_path / "a.bin")
    assert_reads_as_torch_does(tmp_path / "a.bin")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_and_parameters_are_read(tmp_path, protocol):
    torch.manual_seed(0)
    whole = torch.randn(6, 35, dtype=torch.bfloat16)
    state = {
        "whole": whole,
        "tied": whole,
        "shard": whole[2:4],
        "columns": whole[:, 7:14],
        "transposed": whole.t(),
        "permuted": whole.view(6, 5, 7).permute(2, 0, 1),
        "every third": whole[::3, 1::2],
        "expanded": whole[:1].expand(4, 35),
        "diagonal": whole.diagonal(1),
        "scalar": torch.tensor(2.5),
        "scalar of a view": whole[3, 4],
        "empty": torch.zeros(0, 3),
        "empty view": whole[6:],
        "dims of one value": whole[:, None, 3:4].transpose(0, 2),
        "parameter": torch.nn.Parameter(torch.randn(3, dtype=torch.float16)),
        "frozen": torch.nn.Parameter(torch.randn(3, 2).t(), requires_grad=False),
    }
    torch.save(state, tmp_path / "a.bin", pickle_protocol=protocol)
    infos = assert_reads_as_torch_does(tmp_path / "a.bin")
    assert infos["whole"].offset == infos["tied"].offset == infos["transposed"].offset
    assert infos["whole"].strides is None and infos["transposed"].strides == (1, 35)


@pytest.mark.parametrize("names", [None, "state_dict", "model"])
def test_a_modules_state_dict_is_read(tmp_path, names):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).bfloat16()
    module.append(torch.nn.Linear(7, 5, bias=False))
    module[2].weight = torch.nn.Parameter(module[0].weight.t())
    optimizer = torch.optim.AdamW(module.parameters())
    state = module.state_dict()
    assert state._metadata
    saved = {names: state, "optimizer": optimizer.state_dict(), "step": 3} if names else state
    torch.save(saved, tmp_path / "a.bin")
    assert_reads_as_torch_does(tmp_path / "a.bin", names)


def test_a_folder_of_shards_shows_the_values(tmp_path):
    torch.manual_seed(0)
    state = {"a": torch.randn(3, 5).t(), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 2)}
    for i, names in enumerate(("ac", "b"), start=1):
        shard = {name: state[name] for name in names}
        torch.save(shard, tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    (tmp_path / "config.json").write_text("{}")
    folder = open_hf_folder(tmp_path)
    assert folder.tensors.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_array_equal(folder.view(name).astype(np.float32), tensor.float().numpy())
    folder.close()


def test_other_files_of_torch_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    state = {"a": torch.ones(3)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="a bare pickle, as older ones write"):
        read_torch_file(path)
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(UserError, match=r"asks to run torch\.nn\.modules\.linear\.Linear"):
        read_torch_file(path)
    torch.save({"a": torch.ones(3, dtype=torch.complex64)}, path)
    with pytest.raises(UserError, match=r"asks to run torch\.ComplexFloatStorage"):
        read_torch_file(path)
    torch.save({"a": torch.ones(3).to_sparse()}, path)
    with pytest.raises(UserError, match=r"asks to run torch\._utils\._rebuild_sparse_tensor"):
        read_torch_file(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "a.bin")
    with pytest.raises(UserError, match="is a TorchScript program"):
        read_torch_file(tmp_path / "a.bin")

"""Casts against numpy's own, bit for bit."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convert.files.dtypes import FLOATS, NUMPY, cast, name_of, widest
from jaxseek.errors import UserError


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_array_equal(bits(ours), bits(theirs.copy(order="C")))


def as_numpy_casts(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(NUMPY[dtype])


def every_value(dtype: str) -> np.ndarray:
    """All values of 16 bits; of wider floats, random patterns and the corners of rounding."""
    if dtype in ("F16", "BF16"):
        return np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    rng = np.random.default_rng(0)
    size = NUMPY[dtype].itemsize
    patterns = rng.integers(0, 256, size * (1 << 16), dtype=np.uint8).view(NUMPY[dtype])
    narrow = as_numpy_casts(every_value("BF16"), dtype)
    halfway = bits(narrow) + np.array(1 << (8 * size - 17), bits(narrow).dtype)
    return np.concatenate([patterns, narrow, halfway.view(NUMPY[dtype])])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_of_all_values_equal_astype(source, target):
    values = every_value(source)
    expected = as_numpy_casts(values, target)
    assert_same_bits(cast(values, target), expected)
    # Tile by tile too.
    square = values.reshape(128, -1)
    out = np.empty(square.shape[::-1], NUMPY[target])
    assert_same_bits(cast(square.T, target, out=out), expected.reshape(128, -1).T)


def test_a_nan_keeps_its_payload_only_where_the_dtype_stays():
    nan = np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32)
    assert bits(cast(nan, "BF16")).tolist() == [0x7FC0, 0xFFC0]
    assert np.isnan(cast(nan, "BF16").astype(np.float32)).all()
    assert_same_bits(cast(nan, "F32", out=np.empty(2, np.float32)), nan)


@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F32", "BF16"), ("F16", "F16")])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x.T.reshape(301, 3, 7, 10),  # [D, K, G, H] of a projection [K G H, D]
        lambda x: x.reshape(3, 5, 2, 7, 301).transpose(4, 0, 1, 3, 2),  # rope's pairs taken apart
        lambda x: x.reshape(3, 70, 301).transpose(1, 2, 0),
        lambda x: x[::-1, ::-1].T,
        lambda x: x[3::5, 1:200].T,
        lambda x: x[:, None, :1, None],
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        lambda x: np.broadcast_to(x[7], (140, 301)).T,
        lambda x: x[:0].T,
        lambda x: x[5, 6],
    ],
)
def test_any_view_fills_any_out(source, target, view):
    values = np.random.default_rng(1).standard_normal((210, 301), dtype=np.float32)
    array = np.asarray(view(values.astype(NUMPY[source])))
    expected = array.astype(NUMPY[target])
    for order in ("C", "F"):
        out = np.ones(array.shape, NUMPY[target], order=order)
        assert cast(array, target, out=out) is out
        assert_same_bits(out.copy(order="C"), expected)
    wide = np.zeros((*array.shape, 3), NUMPY[target])
    cast(array, target, out=wide[..., 1])
    assert_same_bits(wide[..., 1].copy(order="C"), expected)
    assert not wide[..., ::2].any()


def test_values_at_odd_addresses_of_read_only_memory_are_read():
    values = np.random.default_rng(2).standard_normal((150, 170), dtype=np.float32)
    data = b"\0" + values.tobytes()
    array = np.frombuffer(data, np.float32, offset=1).reshape(150, 170).T
    assert_same_bits(cast(array, "BF16"), values.T.astype(ml_dtypes.bfloat16))
    assert_same_bits(cast(array, "F32", out=np.empty((170, 150), np.float32)), values.T)


def test_nothing_is_copied_where_nothing_is_to_be_done():
    array = np.ones((3, 4), ml_dtypes.bfloat16).T
    assert cast(array, "BF16") is array


@pytest.mark.parametrize("transposed", [False, True])
def test_temporaries_stay_small(transposed):
    array = np.ones((1024, 4096), np.float32)
    array = array.T if transposed else array
    out = np.empty(array.shape, ml_dtypes.bfloat16)
    tracemalloc.start()
    cast(array, "BF16", out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["BF16"], "BF16"),
        (["F16", "F16"], "F16"),
        (["F16", "BF16"], "F32"),
        (["BF16", "F32"], "F32"),
        (["F64", "F16", "BF16"], "F64"),
    ],
)
def test_widest_holds_all_values_exactly(names, expected):
    assert widest(names) == expected
    for name in names:
        values = every_value(name)
        values = values[np.isfinite(as_numpy_casts(values, "F64"))]
        assert_same_bits(cast(cast(values, expected), name), values)


def test_names_are_those_of_safetensors():
    for name, dtype in NUMPY.items():
        assert name_of(dtype) == name_of(dtype.type) == name
        if name != "F8_E8M0":  # its numpy writer lacks it
            header = safetensors.numpy.save({"a": np.zeros(2, dtype)})
            assert f'"dtype":"{name}"'.encode() in header
    with pytest.raises(UserError, match="complex64 cannot be stored"):
        name_of(np.complex64)

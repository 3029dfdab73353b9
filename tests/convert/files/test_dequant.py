"""FP8 with block scales against the formula, one element at a time."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from convert.files.dequant import block_of, dequantise, scale_shape
from jaxseek.errors import UserError

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def codes(shape: tuple[int, int], *, seed: int = 0) -> np.ndarray:
    """Random codes, both zeros and both NaNs among them."""
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    values.flat[:4] = (0x00, 0x80, 0x7F, 0xFF)
    return values.view(E4M3)


def scales(shape: tuple[int, int], block: tuple[int, int], *, seed: int = 1) -> np.ndarray:
    """Scales such as checkpoints have, no two alike."""
    rng = np.random.default_rng(seed)
    return (10 ** rng.uniform(-6, -3, scale_shape(shape, block))).astype(np.float32)


def e4m3_value(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; subnormal at exponent 0."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def by_element(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 [R, C], value by value."""
    out = np.empty(weight.shape, np.float32)
    values = [np.float32(e4m3_value(code)) for code in range(256)]
    raw, factors = weight.view(np.uint8).tolist(), list(scale.astype(np.float32))
    for row, line in enumerate(raw):
        factor = factors[row // block[0]]
        out[row] = [values[code] * factor[i // block[1]] for i, code in enumerate(line)]
    return out


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    finite = ~np.isnan(theirs.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(ours.astype(np.float32)), ~finite)
    kind = np.dtype(f"u{ours.itemsize}")
    np.testing.assert_array_equal(ours.view(kind)[finite], theirs.view(kind)[finite])


@pytest.mark.parametrize(
    ("shape", "block", "scale"),
    [((576, 7168), (128, 128), (5, 56)), ((5, 6), (2, 4), (3, 2)), ((192, 7), (128, 128), (2, 1))],
)
def test_values_are_those_of_the_formula(shape, block, scale):
    weight, factors = codes(shape), scales(shape, block)
    assert factors.shape == scale
    expected = by_element(weight, factors, block)
    assert_same_bits(dequantise(weight, factors, block=block, dtype="F32"), expected)
    rounded = expected.astype(ml_dtypes.bfloat16)
    assert_same_bits(dequantise(weight, factors, block=block, dtype="BF16"), rounded)


def test_negative_zero_and_nan_stay_what_they_are():
    weight, factors = codes((2, 3)), np.ones((1, 1), np.float32)
    values = dequantise(weight, factors, block=(4, 4), dtype="F32").flat
    assert values[0] == values[1] == 0
    assert np.signbit(values[1]) and not np.signbit(values[0])
    assert np.isnan(values[2:4]).all()


def test_bfloat16_is_rounded_once():
    # 1.125 x this scale lies just above the middle of two bfloat16 values, and its bfloat16 scale
    # would give another product.
    weight = np.full((1, 1), 1.125, E4M3)
    factor = np.float32((1 + 3 * 2**-8) / 1.125) * np.float32(1 + 2**-22)
    (value,) = dequantise(weight, np.full((1, 1), factor), block=(8, 8), dtype="BF16").flat
    exact = 1.125 * float(factor)
    candidates = (1 + 2**-7, 1 + 2**-6)
    assert float(value) == min(candidates, key=lambda candidate: abs(candidate - exact))


def test_scales_of_eight_bits_are_powers_of_two():
    block, shape = (2, 3), (9, 7)
    exponents = np.random.default_rng(0).integers(0, 140, scale_shape(shape, block), dtype=np.uint8)
    exponents[0, 0] = 0  # 2^-127, subnormal in float32
    powers = np.ldexp(np.float32(1), exponents.astype(int) - 127).astype(np.float32)
    weight = codes(shape)
    assert_same_bits(
        dequantise(weight, exponents.view(E8M0), block=block, dtype="F32"),
        by_element(weight, powers, block),
    )


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_region_is_the_slice_of_the_whole(dtype):
    shape, block = (37, 45), (8, 6)
    weight, factors = codes(shape), scales(shape, block)
    whole = dequantise(weight, factors, block=block, dtype=dtype)
    regions = [(0, 37, 44, 45), (7, 9, 5, 13), (13, 37, 1, 45), (8, 16, 6, 12), (36, 37, 0, 1)]
    for top, bottom, left, right in [*regions, (5, 5, 0, 45), (0, 37, 9, 9)]:
        region = np.s_[top:bottom, left:right]
        part = dequantise(weight[region], factors, block=block, origin=(top, left), dtype=dtype)
        assert_same_bits(part, whole[region])


def test_a_transposed_weight_counts_by_its_rows_and_columns():
    weight, factors = codes((20, 11)), scales((11, 20), (4, 8))
    expected = by_element(np.ascontiguousarray(weight.T), factors, (4, 8))
    assert_same_bits(dequantise(weight.T, factors, block=(4, 8), dtype="F32"), expected)


def test_temporaries_stay_small():
    weight, factors = codes((2048, 2048)), scales((2048, 2048), (128, 128))
    tracemalloc.start()
    values = dequantise(weight, factors, block=(128, 128), dtype="BF16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - values.nbytes < 4 << 20


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (codes((5, 6)), (2, 2), r"scale is \[2, 2\].* rows to 5 .*2 x 4 need at least \[3, 2\]"),
        (codes((5, 6)), (3, 1), r"scale is \[3, 1\].* columns to 6 .* need at least \[3, 2\]"),
        (codes((5, 6)), (6,), r"only matrices .* \[5, 6\] and the scale \[6\]"),
        (np.zeros((5, 6), ml_dtypes.float8_e5m2), (3, 2), "weight is F8_E5M2; only F8_E4M3"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(weight, scale, message):
    with pytest.raises(UserError, match=message):
        dequantise(weight, np.ones(scale, np.float32), block=(2, 4), dtype="F32")


def test_scales_of_other_dtypes_are_refused():
    with pytest.raises(UserError, match="scale is BF16; known are F32 and F8_E8M0"):
        dequantise(codes((5, 6)), np.ones((3, 2), ml_dtypes.bfloat16), block=(2, 4), dtype="F32")


@pytest.mark.parametrize(
    ("config", "block"),
    [
        (None, None),
        ({"quant_method": "fp8"}, None),
        (
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 64],
            },
            (128, 64),
        ),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, (32, 32)),
    ],
)
def test_the_block_comes_from_the_config(config, block):
    assert block_of(config) == block


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config is 'fp8'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'; only quant_method = 'fp8'"),
        ({"weight_block_size": [128, 128]}, "quant_method = None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'; only fmt = 'e4m3'"),
        ({"quant_method": "fp8", "scale_fmt": "float4"}, "scale_fmt = 'float4'"),
        *(
            ({"quant_method": "fp8", "weight_block_size": size}, "must be two positive integers")
            for size in ([128], 128, [128, 0], [128, 128.0], [True, 128], "ab")
        ),
    ],
)
def test_other_quantisation_is_refused_by_name(config, message):
    with pytest.raises(UserError, match=message):
        block_of(config)

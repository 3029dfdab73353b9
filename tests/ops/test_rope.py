"""Rotary embedding: the papers' frequencies in float64, golden magnitudes, the relative-position
law.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.config import RopeScaling
from jaxseek.ops.rope import (
    apply_rope,
    rope_amplitude,
    rope_frequencies,
    rope_tables,
    softmax_scale,
    yarn_magnitude,
)
from tests.tiny import TINY

YARN = RopeScaling(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def llama(scaling: RopeScaling | None, *, dim: int, base: float):
    return dataclasses.replace(TINY["llama"], head_dim=dim, rope_theta=base, rope_scaling=scaling)


def mla(scaling: RopeScaling | None):
    """V3's head: 128 + 64 dims."""
    return dataclasses.replace(
        TINY["v3"], qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=scaling
    )


def plain_frequencies(dim: int, base: float) -> np.ndarray:
    return np.array([1 / base ** (2 * i / dim) for i in range(dim // 2)])


def test_without_scaling_a_pair_turns_by_base_to_the_minus_2i_over_d():
    actual = rope_frequencies(llama(None, dim=16, base=1e4))
    np.testing.assert_allclose(actual, plain_frequencies(16, 1e4), rtol=1e-7)
    assert actual.dtype == np.float32


def test_linear_scaling_divides_every_frequency():
    scaling = RopeScaling(rope_type="linear", factor=4.0)
    actual = rope_frequencies(llama(scaling, dim=128, base=1e5))
    np.testing.assert_allclose(actual, plain_frequencies(128, 1e5) / 4, rtol=1e-7)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between():
    expected = []
    for frequency in plain_frequencies(128, 5e5):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - share) * frequency / 8 + share * frequency)
    actual = rope_frequencies(llama(LLAMA3, dim=128, base=5e5))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    # All three bands are met.
    ratio = actual / plain_frequencies(128, 5e5)
    assert (ratio > 0.999).any() and (ratio < 0.126).any()
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


def yarn_frequencies(scaling: RopeScaling, *, dim: int, base: float) -> np.ndarray:
    """From the turns that each pair makes within the original context (arXiv:2309.00071, section
    3.2): the ramp begins at the last pair that turns at least beta_fast times and ends at the first
    one that turns at most beta_slow times.
    """
    turns = [scaling.original_max_position_embeddings / (2 * math.pi * base ** (2 * i / dim))
             for i in range(dim)]  # fmt: skip
    first = max((i for i in range(dim) if turns[i] >= scaling.beta_fast), default=0)
    last = min((i for i in range(dim) if turns[i] <= scaling.beta_slow), default=dim - 1)
    width = max(last - first, 0.001)
    ramp = np.array([min(max((i - first) / width, 0.0), 1.0) for i in range(dim // 2)])
    plain = plain_frequencies(dim, base)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


@pytest.mark.parametrize(
    "changes, dim, base",
    [
        ({}, 64, 1e4),  # V2, V3
        ({"factor": 4.0, "original_max_position_embeddings": 32768}, 128, 1e6),  # Qwen3-0528
        ({"original_max_position_embeddings": 64}, 8, 1e4),
        ({"original_max_position_embeddings": 16}, 8, 1e4),  # no pair turns beta_fast times
        ({"beta_fast": 1.0, "beta_slow": 1.0}, 64, 1e4),
    ],
)
def test_yarn_ramps_from_the_fast_pairs_to_the_slow_ones(changes, dim, base):
    scaling = dataclasses.replace(YARN, **changes)
    actual = rope_frequencies(llama(scaling, dim=dim, base=base))
    np.testing.assert_allclose(actual, yarn_frequencies(scaling, dim=dim, base=base), rtol=1e-6)


def test_yarn_of_v3_keeps_11_pairs_and_stretches_the_last_9():
    ratio = plain_frequencies(64, 1e4) / rope_frequencies(mla(YARN))
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 40, rtol=1e-6)
    assert ((ratio[11:23] > 1.05) & (ratio[11:23] < 35)).all()


@pytest.mark.parametrize(
    "mscale, mscale_all_dim, amplitude",
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (1.0, 0.5, 1.1557220),  # (0.1 ln 40 + 1) / (0.05 ln 40 + 1)
        (None, None, 1.3688879),
    ],
)
def test_amplitude_is_the_ratio_of_the_two_magnitudes(mscale, mscale_all_dim, amplitude):
    config = mla(dataclasses.replace(YARN, mscale=mscale, mscale_all_dim=mscale_all_dim))
    assert rope_amplitude(config) == pytest.approx(amplitude, rel=1e-6)
    cos, sin = rope_tables(jnp.array([[0, 77]]), config)
    np.testing.assert_allclose(cos[0, 0], amplitude, rtol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, amplitude**2, rtol=1e-5)


def test_amplitude_of_qwen3_0528_is_1_13863_and_a_stated_one_wins():
    scaling = dataclasses.replace(YARN, factor=4.0)
    assert rope_amplitude(llama(scaling, dim=8, base=1e4)) == pytest.approx(1.13863, abs=5e-6)
    stated = dataclasses.replace(scaling, attention_factor=0.9)
    assert rope_amplitude(llama(stated, dim=8, base=1e4)) == 0.9


@pytest.mark.parametrize("scaling", [None, LLAMA3, RopeScaling(rope_type="linear", factor=4.0)])
def test_amplitude_is_one_without_yarn(scaling):
    assert rope_amplitude(llama(scaling, dim=8, base=1e4)) == 1.0


@pytest.mark.parametrize(
    "mscale_all_dim, scale",
    [(0.707, 0.114721), (1.0, 0.135234), (None, 192**-0.5)],
)
def test_softmax_scale_of_192_dims_at_factor_40(mscale_all_dim, scale):
    config = mla(dataclasses.replace(YARN, mscale=mscale_all_dim, mscale_all_dim=mscale_all_dim))
    assert softmax_scale(config) == pytest.approx(scale, abs=5e-7)


def test_softmax_scale_of_esft_is_plain():
    assert softmax_scale(mla(None)) == pytest.approx(192**-0.5)


def test_yarn_magnitude_is_one_where_nothing_is_stretched():
    assert yarn_magnitude(1.0, 1.0) == 1.0


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_scores_depend_on_the_distance_of_positions_only(pairing):
    config = dataclasses.replace(TINY["llama"], head_dim=8)
    rng = np.random.default_rng(0)
    q, k = (jnp.float32(rng.normal(size=(1, 1, 2, 8))) for _ in range(2))

    def score(i: int, j: int) -> np.ndarray:
        tables = (rope_tables(jnp.array([[p]]), config) for p in (i, j))
        rotated = (apply_rope(x, t, pairing=pairing) for x, t in zip((q, k), tables, strict=True))
        return np.einsum("bthd,bthd->h", *rotated)

    reference = score(19, 7)
    for shift in (1, 64, 500):
        np.testing.assert_allclose(score(19 + shift, 7 + shift), reference, atol=2e-4)
    assert np.abs(score(19, 8) - reference).max() > 0.01


def test_interleaved_is_half_on_reordered_dims():
    config = dataclasses.replace(TINY["llama"], head_dim=8)
    x = jnp.float32(np.random.default_rng(0).normal(size=(1, 5, 2, 3, 8)))
    tables = rope_tables(jnp.arange(64, 69)[None], config)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    half = apply_rope(x[..., order], tables, pairing="half")
    np.testing.assert_array_equal(apply_rope(x, tables, pairing="interleaved")[..., order], half)


def test_rotation_is_the_complex_product():
    config = dataclasses.replace(TINY["llama"], head_dim=8)
    x = np.random.default_rng(0).normal(size=(1, 3, 1, 8))
    positions = np.array([0, 65, 200])
    angles = positions[:, None] * plain_frequencies(8, config.rope_theta)
    turned = (x[0, :, 0, ::2] + 1j * x[0, :, 0, 1::2]) * np.exp(1j * angles)
    tables = rope_tables(jnp.asarray(positions)[None], config)
    actual = np.asarray(apply_rope(jnp.float32(x), tables, pairing="interleaved"))[0, :, 0]
    np.testing.assert_allclose(actual[:, ::2], turned.real, atol=2e-5)
    np.testing.assert_allclose(actual[:, 1::2], turned.imag, atol=2e-5)


def test_angles_are_float32_at_positions_that_bfloat16_cannot_tell_apart():
    config = llama(None, dim=64, base=1e4)
    positions = np.array([255, 256, 257, 258, 259, 260, 16000])
    tables = rope_tables(jnp.asarray(positions, jnp.int32)[None], config)
    angles = positions[:, None] * plain_frequencies(64, 1e4)
    for actual, expected in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual[0, :-1], expected[:-1], atol=4e-5)
        np.testing.assert_allclose(actual[0, -1], expected[-1], atol=2e-3)


def test_bfloat16_activations_are_rotated_in_float32():
    config = dataclasses.replace(TINY["llama"], head_dim=8)
    x = jnp.bfloat16(np.random.default_rng(0).normal(size=(1, 1, 1, 8)))
    tables = rope_tables(jnp.array([[257]]), config)
    y = apply_rope(x, tables, pairing="half")
    assert y.dtype == jnp.bfloat16
    exact = apply_rope(x.astype(jnp.float32), tables, pairing="half")
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))

"""Attention against numpy in float64, the laws of its mask, and what the compiler makes of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxseek.errors import UserError
from jaxseek.ops.attention import attention, choose_implementation

SCALE = 0.31
# Length, kv heads, groups, head dim, value dim: tests share them and so the compiled programs.
MLA = (37, 3, 1, 12, 7)
GROUPED = (130, 2, 3, 8, 10)
FORMS = {
    "plain": functools.partial(attention, implementation="plain"),
    "blockwise": functools.partial(attention, implementation="blockwise", block_size=32),
}


@pytest.fixture(params=[MLA, GROUPED], ids=["MLA", "grouped"])
def inputs(request):
    """q, k, v and the cotangent of the output, in float64."""
    return random_inputs(*request.param)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def random_inputs(length, kv_heads, groups, head_dim, value_dim, *, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, length, kv_heads, groups, head_dim),
        (batch, length, kv_heads, head_dim),
        (batch, length, kv_heads, value_dim),
        (batch, length, kv_heads, groups, value_dim),
    )
    return tuple(rng.normal(size=shape) for shape in shapes)


def as_float32(arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def documents(length, *, batch=2):
    """Segment ids [batch, length]: documents of 5, 40, 20, ... tokens, shifted from row to row."""
    borders = np.isin(np.arange(length), (5, 45, 65, 66, 100))
    row = 7 - np.cumsum(borders)
    return np.stack([np.roll(row, 3 * b) for b in range(batch)]).astype(np.int32)


def reference(q, k, v, d_out, *, segments=None):
    """Output and gradients of q, k, v in numpy, with the T x T weights of each head in memory."""
    length = q.shape[1]
    visible = np.tril(np.ones((length, length), bool))[None]
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    scores = np.einsum("btkgh,bskh->bkgts", q, k) * SCALE
    scores = np.where(visible[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bkgts,bskh->btkgh", weights, v)
    d_weights = np.einsum("btkgh,bskh->bkgts", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * SCALE
    d_q = np.einsum("bkgts,bskh->btkgh", d_scores, k)
    d_k = np.einsum("bkgts,btkgh->bskh", d_scores, q)
    d_v = np.einsum("bkgts,btkgh->bskh", weights, d_out)
    return out, d_q, d_k, d_v


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(form, q, k, v, d_out, *, segments=None):
    """Output and gradients of q, k, v of an implementation."""
    out, pull = jax.vjp(lambda *x: form(*x, scale=SCALE, segment_ids=segments), q, k, v)
    return out, *pull(d_out)


def assert_all_close(got, expected, tolerance):
    """Each array within `tolerance` of the largest absolute value expected in it."""
    for one, other in zip(got, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_output_and_gradients_match_numpy_in_float64(inputs, form, packed):
    segments = documents(inputs[0].shape[1]) if packed else None
    got = value_and_gradients(form, *as_float32(inputs), segments=segments)
    assert_all_close(got, reference(*inputs, segments=segments), 2e-6)


@pytest.mark.parametrize("block_size", [16, 100, None])
def test_blockwise_matches_numpy_with_full_blocks_with_one_larger_block_and_by_default(block_size):
    inputs = random_inputs(64, 1, 1, 8, 8)
    form = functools.partial(attention, implementation="blockwise", block_size=block_size)
    got = value_and_gradients(form, *as_float32(inputs))
    assert_all_close(got, reference(*inputs), 2e-6)


def test_scores_too_large_for_exp_give_finite_results(form):
    q, k, v, d_out = random_inputs(*GROUPED)
    inputs = 40 * q, 40 * k, v, d_out
    got = value_and_gradients(form, *as_float32(inputs), segments=documents(130))
    assert all(np.isfinite(x).all() for x in got)
    # The scores reach 5e3, where float32 is 5e-4 apart: the weights, their exponentials, follow.
    assert_all_close(got[:1], reference(*inputs, segments=documents(130))[:1], 2e-3)


def test_in_bfloat16_output_and_gradients_stay_within_its_rounding(form):
    """Seven bits behind the point: 2^-8 for rounding an input, the weights or the result."""
    inputs = tuple(jnp.asarray(x, jnp.bfloat16) for x in random_inputs(*GROUPED))
    got = value_and_gradients(form, *inputs)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_all_close(got, reference(*(np.asarray(x, float) for x in inputs)), 2**-7)


def test_an_output_has_gradients_from_its_own_and_earlier_tokens_only(inputs, form):
    q, k, v, d_out = as_float32(inputs)
    for token in (1, 31, 35):
        one_output = jnp.zeros_like(d_out).at[:, token].set(d_out[:, token])
        _, *gradients = value_and_gradients(form, q, k, v, one_output)
        for gradient in gradients:
            assert np.all(np.asarray(gradient[:, token + 1 :]) == 0)
        _, d_k, d_v = gradients
        assert np.all(np.asarray(d_k[:, : token + 1]).any(axis=-1))
        assert np.all(np.asarray(d_v[:, : token + 1]).any(axis=-1))


def test_a_document_does_not_notice_at_all_when_the_one_before_it_changes(form):
    """Difference exactly 0 in float32, in the output and in every gradient."""
    q, k, v, d_out = as_float32(random_inputs(*GROUPED))
    border = 50
    segments = np.broadcast_to((np.arange(130) >= border).astype(np.int32), (2, 130))
    before = value_and_gradients(form, q, k, v, d_out, segments=segments)
    changed = (x.at[:, :border].set(17 * x[:, :border] + 3) for x in (q, k, v, d_out))
    after = value_and_gradients(form, *changed, segments=segments)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[:, border:], other[:, border:])
        assert np.all(np.any(np.asarray(one[:, 1:border] != other[:, 1:border]), axis=-1))


def test_a_packed_document_gives_what_it_gives_alone(form):
    inputs = as_float32(random_inputs(*GROUPED))
    segments = np.broadcast_to(np.repeat([4, 9], [61, 69]).astype(np.int32), (2, 130))
    packed = value_and_gradients(form, *inputs, segments=segments)
    alone = value_and_gradients(form, *(x[:, 61:] for x in inputs))
    assert_all_close((x[:, 61:] for x in packed), alone, 2e-6)


def test_one_segment_id_everywhere_is_no_segment_ids_bit_for_bit(inputs, form):
    segments = np.full(inputs[0].shape[:2], 3, np.int32)
    without = value_and_gradients(form, *as_float32(inputs))
    with_one = value_and_gradients(form, *as_float32(inputs), segments=segments)
    for one, other in zip(with_one, without, strict=True):
        np.testing.assert_array_equal(one, other)


def test_split_over_devices_it_gives_the_numbers_of_one_device(form):
    """Inside shard_map, scan and checkpoint as in a model: batch over data, heads over tensor."""
    inputs = as_float32(random_inputs(70, 2, 2, 8, 6, batch=3))
    segments = documents(70, batch=3)
    expected = value_and_gradients(form, *inputs, segments=segments)
    mesh = jax.make_mesh((3, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, tokens = P("data", None, "tensor"), P("data")

    def split(q, k, v, d_out, segments):
        @jax.checkpoint
        def layer(carry, x):
            return carry, form(*x, scale=SCALE, segment_ids=segments)

        def stack(*inputs):
            return jax.lax.scan(layer, None, [x[None] for x in inputs])[1][0]

        out, pull = jax.vjp(stack, q, k, v)
        return out, *pull(d_out)

    split = jax.shard_map(
        split, mesh=mesh, in_specs=(heads,) * 4 + (tokens,), out_specs=(heads,) * 4
    )
    got = jax.jit(split)(*inputs, segments)
    assert_all_close(got, expected, 1e-6)


def compiled_gradient(*, length, policy=None):
    """Value and gradient of a layer of blockwise attention, 1 x `length` tokens, 2 heads of 16."""
    spec = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q, k, v):
        q = q[:, :, :, None]
        out = attention(q, k, v, scale=SCALE, implementation="blockwise", block_size=128)
        return jnp.sum(jnp.cos(out))

    return jax.jit(jax.value_and_grad(layer, argnums=(0, 1, 2))).lower(spec, spec, spec).compile()


def test_memory_of_the_blockwise_gradient_grows_linearly_with_the_length():
    short, long = (
        compiled_gradient(length=length).memory_analysis().temp_size_in_bytes
        for length in (1024, 2048)
    )
    assert long < 2.2 * short
    assert long < 2048 * 2048 * 4  # one T x T matrix of scores of one head


def test_a_remat_policy_that_saves_the_named_values_spares_the_second_forward():
    save = jax.checkpoint_policies.save_only_these_names("attn_out", "attn_lse")

    def loops(policy):
        return compiled_gradient(length=256, policy=policy).as_text().count(" while(")

    assert loops(jax.checkpoint_policies.nothing_saveable) == 3
    assert loops(save) == 2


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("plain", {"length": 128}),
        ("blockwise", {"length": 256}),
        ("blockwise", {"platform": "tpu"}),
        ("plain", {"platform": "tpu", "length": 1000}),
        ("cudnn", {"platform": "gpu"}),
        ("cudnn", {"platform": "cuda", "length": 512, "compute_capability": 12.0}),
        ("blockwise", {"platform": "gpu", "packed": True}),
        ("blockwise", {"platform": "gpu", "dtype": jnp.float32}),
        ("blockwise", {"platform": "gpu", "head_dim": 192}),
        ("blockwise", {"platform": "gpu", "head_dim": 192, "value_dim": 192}),
        ("blockwise", {"platform": "gpu", "head_dim": 60, "value_dim": 60}),
        ("blockwise", {"platform": "gpu", "compute_capability": 7.5}),
        ("plain", {"platform": "gpu", "compute_capability": 7.5, "length": 512}),
    ],
)
def test_auto_takes_cudnn_where_it_can_and_blockwise_where_memory_matters(expected, changes):
    inputs = {
        "length": 4096,
        "head_dim": 128,
        "value_dim": 128,
        "dtype": jnp.bfloat16,
        "packed": False,
    }
    assert choose_implementation(**{**inputs, **changes}) == expected


@pytest.mark.parametrize(("length", "chosen"), [(50, "plain"), (150, "blockwise")])
def test_auto_computes_what_the_chosen_implementation_computes(length, chosen):
    q, k, v, _ = as_float32(random_inputs(length, 1, 1, 8, 8))
    assert chosen == choose_implementation(
        length=length, head_dim=8, value_dim=8, dtype=q.dtype, packed=False
    )
    expected = attention(q, k, v, scale=SCALE, implementation=chosen)
    np.testing.assert_array_equal(attention(q, k, v, scale=SCALE), expected)


def test_cudnn_gets_heads_scale_and_segments_as_jax_wants_them(monkeypatch):
    """JAX's own XLA implementation answers the call, with the arguments that cuDNN would get."""
    jax_attention = jax.nn.dot_product_attention

    def answer(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return jax_attention(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    monkeypatch.setattr("jaxseek.ops.attention.target_platform", lambda: "gpu")
    *qkv, d_out = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs(38, 2, 3, 8, 8))
    for segments in (None, documents(38)):
        expected, *_ = reference(*(np.asarray(x, float) for x in (*qkv, d_out)), segments=segments)
        got = attention(*qkv, scale=SCALE, segment_ids=segments, implementation="cudnn")
        assert_all_close([got], [expected], 2**-7)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [("cudnn", "cuDNN needs an NVIDIA GPU"), ("flash", "auto, plain, blockwise, cudnn")],
)
def test_an_implementation_that_is_not_to_be_had_is_a_mistake_of_the_user(implementation, message):
    q, k, v, _ = as_float32(random_inputs(8, 1, 1, 8, 8))
    with pytest.raises(UserError, match=message):
        attention(q, k, v, scale=SCALE, implementation=implementation)


def test_cudnn_is_refused_for_packed_documents_of_odd_length(monkeypatch):
    monkeypatch.setattr("jaxseek.ops.attention.target_platform", lambda: "gpu")
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs(37, 1, 1, 8, 8))
    with pytest.raises(UserError, match="even sequence length for packed documents and it is 37"):
        attention(q, k, v, scale=SCALE, implementation="cudnn", segment_ids=documents(37))

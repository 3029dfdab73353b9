"""Validation and the next token's logits: the same on any mesh and in any batch."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxseek.data.loader import validation_batches
from jaxseek.data.token_stream import TokenStream
from jaxseek.train.loop import evaluate
from jaxseek.train.state import attach_bias
from jaxseek.train.step import make_eval_step, make_logits
from tests.train.programs import Stepper, rows, stepper


def stream() -> TokenStream:
    """Documents of very different lengths: batches hold different numbers of labels."""
    lengths = [3, 70, 5, 2, 41, 9, 9, 30]
    rng = np.random.default_rng(0)
    return TokenStream(
        tokens=rng.integers(0, 131, sum(lengths)).astype(np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        names=tuple(f"document{i}" for i in range(len(lengths))),
    )


def validation_loss(one: Stepper, *, batch: int) -> dict:
    """The line that `evaluate` writes."""
    lines = []
    training = types.SimpleNamespace(
        program=one.program,
        evaluate=make_eval_step(one.program),
        validation=validation_batches(stream(), batch=batch, context=16, vocab_size=131, pad_id=0),
        folder=types.SimpleNamespace(log=lines.append),
    )
    evaluate(training, one.init(), step=4)  # pyright: ignore[reportArgumentType]
    return lines[0]


def test_validation_loss_is_per_token_whatever_the_batch_and_the_mesh():
    one = stepper("v3")
    reference = validation_loss(one, batch=1)
    labels = stream().num_label_tokens
    assert (reference["step"], reference["val_tokens"]) == (4, labels)
    cases = [(one, 4), (stepper("v3", mesh="3x1"), 6), (stepper("v3", mesh="2x3", zero=3), 4)]
    for other, batch in cases:
        line = validation_loss(other, batch=batch)
        assert line["val_tokens"] == labels
        assert line["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


@pytest.mark.parametrize("mesh, zero", [("3x1", None), ("2x3", 3)])
def test_logits_on_a_mesh_are_those_of_the_model_on_one_device(mesh, zero):
    one = stepper("v3")
    state = one.init()
    whole = nnx.merge(one.program.graphdef, attach_bias(state.params, state.router_bias))
    tokens = jnp.asarray(rows(batch=2)[0])
    expected = jax.jit(lambda tokens: whole(tokens)[:, 9])(tokens)
    many = stepper("v3", mesh=mesh) if zero is None else stepper("v3", mesh=mesh, zero=zero)
    actual = make_logits(many.program)(many.init(), tokens, jnp.int32(9))
    assert actual.shape == (2, 131)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

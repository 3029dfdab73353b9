"""jaxseek on the weights and tokens of the reference, and how far the two are apart."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from convert.names import params_from_hf, params_to_hf
from jaxseek.config import ModelConfig
from jaxseek.layers import moe
from jaxseek.layout import flatten_paths
from jaxseek.model import Execution, Inputs, Transformer, split
from jaxseek.ops.cross_entropy import IGNORE_LABEL
from tests.parity.oracle import Oracle

LOGITS_TOLERANCE = 1e-4  # largest difference, in standard deviations of the logits
GRADIENT_TOLERANCE = 1e-3  # norm of the difference, in norms of the gradient
LAYER_TOLERANCE = 1e-5  # largest difference, in standard deviations of the output

# Tiny models: compiling them takes a hundred times as long as running them.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What jaxseek computes of what an `Oracle` holds; `gradients` are nested as parameters are."""

    logits: np.ndarray
    loss: float
    expert_ids: list[np.ndarray]
    gradients: dict[str, Any] | None


def run(
    reference: Oracle,
    *,
    config: ModelConfig | None = None,
    params: Any = None,
    gradients: bool = True,
) -> Result:
    """The model of `reference` in jaxseek, with another config or other parameters where given."""
    config = config or reference.config
    params = params or params_from_hf(reference.config, reference.tensors)
    graphdef, _ = split(config)
    tokens = reference.tokens
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    labels = np.full_like(tokens, IGNORE_LABEL)
    labels[:, :-1] = tokens[:, 1:]

    def loss(params, inputs, labels):
        model = nnx.merge(graphdef, params)
        with _recorded(Transformer, "hidden") as hidden:
            total, stats = model.loss_sum(inputs, labels, execution=Execution())
        logits = model.logits(hidden[0][0], execution=Execution())
        mean = total / (tokens.shape[0] * (tokens.shape[1] - 1))
        return mean, (logits, [] if stats is None else stats.counts)

    step = jax.value_and_grad(loss, has_aux=True) if gradients else loss
    step = jax.jit(step, compiler_options=COMPILE_QUICKLY)
    # Layers report how often each expert was chosen; here, instead, what each token chose.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "expert_counts", lambda expert_ids, num_experts: expert_ids)
        results = step(params, Inputs(tokens, positions, None), labels)
    (mean, (logits, ids)), grads = results if gradients else (results, None)
    return Result(
        logits=np.asarray(logits),
        loss=float(mean),
        expert_ids=[np.asarray(layer) for layer in ids],
        gradients=jax.tree.map(np.asarray, grads),
    )


@contextlib.contextmanager
def _recorded(owner: type, name: str) -> Iterator[list]:
    """The results of every call of a method, within the context."""
    method, results = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        results.append(method(*args, **kwargs))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapper)
        yield results


def check_logits(result: Result, reference: Oracle) -> None:
    """Fails where a logit is further from the reference's than `LOGITS_TOLERANCE`."""
    check_close(result.logits, reference.logits, tolerance=LOGITS_TOLERANCE)
    assert abs(result.loss - reference.loss) < 1e-5 * reference.loss


def check_gradients(result: Result, reference: Oracle) -> None:
    """Fails where a gradient, by HF's names or by ours, is further than `GRADIENT_TOLERANCE`."""
    theirs = dict(reference.gradients)
    ours = params_to_hf(reference.config, result.gradients, experts="fused")
    for name in set(ours) - set(theirs):  # chooses experts, and has no gradient
        assert name.endswith("e_score_correction_bias")
        theirs[name] = np.zeros_like(ours[name])
    by_hf = {name: _distance(ours[name], theirs[name]) for name in theirs}
    theirs = flatten_paths(params_from_hf(reference.config, theirs))
    ours = flatten_paths(result.gradients)
    by_path = {path: _distance(ours[path], theirs[path]) for path in ours.keys() | theirs.keys()}
    wrong = {k: v for k, v in (by_hf | by_path).items() if not v < GRADIENT_TOLERANCE}
    assert not wrong, f"relative distances of gradients: {wrong}"


def check_expert_ids(result: Result, reference: Oracle) -> None:
    """Fails where a token chooses other experts in any layer."""
    assert len(result.expert_ids) == len(reference.expert_ids)
    for layer, (ours, theirs) in enumerate(
        zip(result.expert_ids, reference.expert_ids, strict=True)
    ):
        differ = (np.sort(ours, axis=-1) != np.sort(theirs, axis=-1)).any(axis=-1)
        assert not differ.any(), f"MoE layer {layer}: tokens {np.flatnonzero(differ)} differ"


def check_close(ours: Any, theirs: np.ndarray, *, tolerance: float) -> None:
    """Fails where the largest difference exceeds `tolerance` standard deviations of `theirs`."""
    distance = np.abs(np.asarray(ours) - theirs).max() / theirs.std()
    assert distance < tolerance, f"{distance:.1e} standard deviations apart"


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Norm of the difference over the norm of `theirs`; where that is zero, 0 if `ours` is too."""
    assert ours.shape == theirs.shape
    norm = np.linalg.norm(theirs)
    difference = np.linalg.norm(ours - theirs)
    return float(difference / norm) if norm else float("inf" if difference else 0)

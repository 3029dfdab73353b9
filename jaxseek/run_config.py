"""`RunConfig`: everything that fixes a training run, checked as a whole when it is made."""

import dataclasses
from typing import Literal

from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.mesh import MeshShape

DEFAULT_BATCH = 12


# Above the classes, whose defaults are made, and so checked, while the module is read.
def _check_at_least(least: int, config: object, name: str, *, prefix: str = ""):
    if getattr(config, name) < least:
        raise UserError(f"{prefix}{name} must be at least {least}, got {getattr(config, name)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule. Steps are optimizer steps, never micro-batches.

    Attributes:
        learning_rate: the peak, reached at the end of the warm-up.
        beta1: decay of the gradient's running mean.
        beta2: decay of the squared gradient's running mean.
        eps: added to the root of the second moment.
        weight_decay: of matrices; norms, biases and the router's balance bias are not decayed.
        clip_norm: largest global gradient norm; 0 switches clipping off.
        schedule: after the linear warm-up: `cosine` to `final_fraction` of the peak, `constant`, or
            `multi_step`, DeepSeek's x 0.316 at `multi_step_at[0]` and x 0.1 at `multi_step_at[1]`
            of the steps (DeepSeek LLM, arXiv:2401.02954).
        warmup_steps: length of the linear warm-up; left out, a fifth of the steps and at most 2000
            (DeepSeek's).
        final_fraction: where `cosine` ends, as a share of the peak.
        multi_step_at: where `multi_step` steps down, as shares of the run.
        max_bad_steps: stop after so many steps in a row whose gradient is not finite (each of them
            is skipped).
    """

    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: Literal["cosine", "constant", "multi_step"] = "cosine"
    warmup_steps: int | None = None
    final_fraction: float = 0.1
    multi_step_at: tuple[float, float] = (0.8, 0.9)
    max_bad_steps: int = 10

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            if getattr(self, name) <= 0:
                raise UserError(f"optim.{name} must be positive, got {getattr(self, name)}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"optim.{name} must be at least 0 and below 1, got {getattr(self, name)}."
                )
        for name in ("weight_decay", "clip_norm"):
            _check_at_least(0, self, name, prefix="optim.")
        if self.warmup_steps is not None:
            _check_at_least(0, self, "warmup_steps", prefix="optim.")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(
                f"optim.final_fraction must be between 0 and 1, got {self.final_fraction}."
            )
        first, second = self.multi_step_at
        if not 0 < first < second < 1:
            raise UserError(
                f"optim.multi_step_at must be two rising shares of the run between 0 and 1, "
                f"got [{first}, {second}]."
            )
        _check_at_least(1, self, "max_bad_steps", prefix="optim.")

    def resolved_warmup(self, steps: int) -> int:
        """`warmup_steps`, or its default for a run of `steps`: a fifth of them, at most 2000."""
        return min(steps // 5, 2000) if self.warmup_steps is None else self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How the experts' load is kept even.

    Attributes:
        bias_update_speed: gamma of DeepSeek-V3, added to or taken from `e_score_correction_bias`
            once per optimizer step.
        balance_alpha: weight of the balance loss; left out, the model's `aux_loss_alpha` (V2) or
            1e-4 (V3, arXiv:2412.19437).
    """

    bias_update_speed: float = 0.001
    balance_alpha: float | None = None

    def __post_init__(self):
        _check_at_least(0, self, "bias_update_speed", prefix="router.")
        if self.balance_alpha is not None:
            _check_at_least(0, self, "balance_alpha", prefix="router.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on.

    Attributes:
        source: `stdlib` (the running Python's own sources), or a file, folder or glob of .txt, .md,
            .py or .jsonl.
        tokenizer: a `tokenizer.json` or its folder; left out, a byte-level BPE of the model's
            `vocab_size` is trained on the source.
        validation_fraction: share of the documents, chosen by a hash of their names, that is never
            trained on.
    """

    source: str = "stdlib"
    tokenizer: str | None = None
    validation_fraction: float = 0.05

    def __post_init__(self):
        if not 0 < self.validation_fraction < 1:
            raise UserError(
                f"data.validation_fraction must be between 0 and 1, got {self.validation_fraction}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation.

    Attributes:
        every: steps between two validations; 0 validates only at the start and at the end.
        sequences: how many sequences are validated on.
    """

    every: int = 0
    sequences: int = 48

    def __post_init__(self):
        _check_at_least(0, self, "every", prefix="eval.")
        _check_at_least(1, self, "sequences", prefix="eval.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        every: steps between two checkpoints; 0 writes one only at the end.
        keep: how many of the last checkpoints stay.
    """

    every: int = 0
    keep: int = 2

    def __post_init__(self):
        _check_at_least(0, self, "every", prefix="checkpoint.")
        _check_at_least(1, self, "keep", prefix="checkpoint.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run.

    The batch may be given as `batch` or as `batch_tokens`; either way `batch` holds the sequences
    afterwards and `batch_tokens` is `None`, so that a written config says it in one way only.

    Attributes:
        mesh: `AxB`, data x tensor devices; as a flag `auto` too, what the plan finds best for the
            GPUs of this machine (with zero, remat and accumulation, where they are left out).
        zero: what is stored split over the data devices: 0 nothing, 1 the optimizer state, 2
            gradients too, 3 parameters too; left out, 3 from two data devices on, else 0.
        dtype: of the computation; masters and optimizer state are float32 always.
        steps: optimizer steps.
        batch: sequences per optimizer step, over all devices and micro-batches; 12 where
            `batch_tokens` is not given either.
        batch_tokens: the batch in tokens, instead of `batch`; a multiple of `seq_len`.
        accumulation: micro-batches per optimizer step.
        seq_len: tokens per sequence.
        remat: what the backward pass recomputes of a layer: `none` (no products), `selective` (all
            but attention and what follows it), `full` (all).
        seed: of the initial parameters and of the order of the data.
        init_from: the folder that the first weights are read from: a Hugging Face folder, a
            converted model or another run; `--model DIR` sets it. Left out, they are random.
        stop_after: end, with a checkpoint, after this step; the schedule still reckons with
            `steps`.

    Raises:
        UserError: when the fields contradict each other or the model; the message shows the
            arithmetic and what is possible.
    """

    model: ModelConfig
    mesh: str = "1x1"
    zero: Literal[0, 1, 2, 3] | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    steps: int = 150
    batch: int | None = None
    batch_tokens: int | None = None
    accumulation: int = 1
    seq_len: int = 256
    remat: Literal["none", "selective", "full"] = "selective"
    seed: int = 0
    init_from: str | None = None
    stop_after: int | None = None
    optim: OptimConfig = OptimConfig()
    router: RouterConfig = RouterConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self):
        for name in ("steps", "accumulation", "seq_len"):
            _check_at_least(1, self, name)
        _check_at_least(0, self, "seed")
        self._check_steps()
        self._check_model()
        # The one place that writes to a frozen config: from here on the batch stands in sequences,
        # however it was given.
        object.__setattr__(self, "batch", self._resolve_batch())
        object.__setattr__(self, "batch_tokens", None)

    @property
    def mesh_shape(self) -> MeshShape:
        """`mesh`, parsed."""
        return MeshShape.parse(self.mesh)

    @property
    def resolved_zero(self) -> Literal[0, 1, 2, 3]:
        """`zero`, or its default: 3 from two data devices on, else 0."""
        if self.zero is None:
            return 3 if self.mesh_shape.data >= 2 else 0
        return self.zero

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all devices and micro-batches."""
        assert self.batch is not None
        return self.batch

    @property
    def sequences_per_micro_batch(self) -> int:
        """Sequences of one micro-batch on one data device."""
        return self.sequences_per_step // (self.mesh_shape.data * self.accumulation)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all devices and micro-batches."""
        return self.sequences_per_step * self.seq_len

    def _check_steps(self):
        if self.optim.resolved_warmup(self.steps) > self.steps:
            raise UserError(
                f"optim.warmup_steps {self.optim.warmup_steps} is more than steps {self.steps}; "
                f"give at most {self.steps}, or leave it out."
            )
        if self.stop_after is not None and not 1 <= self.stop_after <= self.steps:
            raise UserError(
                f"stop_after {self.stop_after} is not between 1 and steps {self.steps}."
            )

    def _check_model(self):
        longest = self.model.max_position_embeddings
        if self.seq_len > longest:
            raise UserError(
                f"seq_len {self.seq_len} is longer than the model's max_position_embeddings "
                f"{longest}; give at most {longest}, or raise model.max_position_embeddings."
            )

    def _resolve_batch(self) -> int:
        if self.batch is not None and self.batch_tokens is not None:
            raise UserError(
                f"batch {self.batch} and batch_tokens {self.batch_tokens} are both given; give one."
            )
        if self.batch_tokens is not None:
            return self._batch_from_tokens(self.batch_tokens)
        if self.batch is None:
            return self._check_divides(DEFAULT_BATCH, f"batch {DEFAULT_BATCH} (the default)")
        _check_at_least(1, self, "batch")
        return self._check_divides(self.batch, f"batch {self.batch}")

    def _batch_from_tokens(self, tokens: int) -> int:
        _check_at_least(1, self, "batch_tokens")
        unit = self.seq_len * self.mesh_shape.data * self.accumulation
        if tokens % unit:
            raise UserError(
                f"batch_tokens {tokens} is not a multiple of {unit} = seq_len {self.seq_len} x "
                f"{self.mesh_shape.data} data devices (--mesh {self.mesh}) x accumulation "
                f"{self.accumulation}; use {_nearest(tokens, unit)}."
            )
        return tokens // self.seq_len

    def _check_divides(self, batch: int, name: str) -> int:
        unit = self.mesh_shape.data * self.accumulation
        if batch % unit:
            raise UserError(
                f"{name} is not a multiple of {unit} = {self.mesh_shape.data} data devices "
                f"(--mesh {self.mesh}) x accumulation {self.accumulation}: {batch} / {unit} = "
                f"{batch / unit:.4g}; use {_nearest(batch, unit)}."
            )
        return batch


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"

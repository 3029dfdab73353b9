"""Which ways there are to run a model on some GPUs. Nothing here imports JAX."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from jaxseek.config import ModelConfig
from jaxseek.devices import Fleet
from jaxseek.errors import UserError
from jaxseek.mesh import MeshShape
from jaxseek.run_config import RunConfig

Zero = Literal[0, 1, 2, 3]
Remat = Literal["none", "selective", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run; `state` and `offload` have one legal value each today."""

    mesh: str
    zero: Zero
    remat: Remat
    state: Literal["float32"] = "float32"
    offload: Literal["none"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes:
        name: of the model, as it was given.
        micro_batch_tokens: of one micro-batch on one data device; a multiple of `seq_len`.
        tokens_per_step: least tokens of an optimizer step; `None` is one micro-batch each.
        only: what is fixed, by field of `Choice`, as text.
    """

    name: str
    model: ModelConfig
    fleet: Fleet
    seq_len: int = 4096
    micro_batch_tokens: int | None = None
    tokens_per_step: int | None = None
    only: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.seq_len < 1:
            raise UserError(f"--seq-len must be at least 1, got {self.seq_len}.")
        tokens = self.resolved_micro_batch
        if tokens < 1 or tokens % self.seq_len:
            raise UserError(
                f"--batch-per-gpu {tokens} tokens is not a multiple of --seq-len {self.seq_len}; "
                f"use {max(1, round(tokens / self.seq_len)) * self.seq_len}."
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise UserError(f"--tokens-per-step must be at least 1, got {self.tokens_per_step}.")

    @property
    def resolved_micro_batch(self) -> int:
        """`micro_batch_tokens`, or its default: one sequence."""
        return self.seq_len if self.micro_batch_tokens is None else self.micro_batch_tokens

    def accumulation(self, mesh: MeshShape) -> int:
        """Micro-batches of a step, so that it has at least `tokens_per_step`."""
        if self.tokens_per_step is None:
            return 1
        return math.ceil(self.tokens_per_step / (self.resolved_micro_batch * mesh.data))

    def run(self, choice: Choice) -> RunConfig:
        """The training run that `choice` stands for.

        Raises:
            UserError: when the model cannot be run so, for example on sequences of that length.
        """
        shape = MeshShape.parse(choice.mesh)
        accumulation = self.accumulation(shape)
        sequences = self.resolved_micro_batch // self.seq_len
        return RunConfig(
            model=self.model,
            mesh=choice.mesh,
            zero=choice.zero,
            remat=choice.remat,
            seq_len=self.seq_len,
            batch=sequences * shape.data * accumulation,
            accumulation=accumulation,
        )


def find_choices(request: Request) -> list[Choice]:
    """The legal choices that agree with `request.only`, in no order of merit.

    ZeRO 2 differs from ZeRO 1 only where gradients are accumulated; elsewhere it is left out unless
    it is asked for.

    Raises:
        UserError: when nothing agrees; the message says which values are legal.
    """
    only = request.only
    fields = [field.name for field in dataclasses.fields(Choice)]
    for key in only:
        if key not in fields:
            raise UserError(f"--only: {key!r} is not known; known are {', '.join(fields)}.")
    legal = list(_legal(request))
    for key, wanted in only.items():
        values = list(dict.fromkeys(str(getattr(choice, key)) for choice in legal))
        legal = [choice for choice in legal if str(getattr(choice, key)) == wanted]
        if not legal:
            raise UserError(_impossible(key, wanted, values, request=request))
    if "zero" in only:
        return legal
    return [
        choice
        for choice in legal
        if choice.zero != 2 or request.accumulation(MeshShape.parse(choice.mesh)) > 1
    ]


def _legal(request: Request) -> Iterator[Choice]:
    count = request.fleet.count
    for data in sorted((n for n in range(1, count + 1) if count % n == 0), reverse=True):
        # With one data device ZeRO splits what the tensor devices would hold whole each.
        levels: tuple[Zero, ...] = (0, 1, 2, 3) if data > 1 else (0, 3) if count > 1 else (0,)
        for zero in levels:
            for remat in get_args(Remat):
                yield Choice(mesh=f"{data}x{count // data}", zero=zero, remat=remat)


def _impossible(key: str, wanted: str, values: list[str], *, request: Request) -> str:
    possible = f"possible: {', '.join(values)}."
    if key == "mesh":
        shape = MeshShape.parse(wanted)
        return (
            f"--mesh {shape} has {shape.devices} devices, not those of {request.fleet}; {possible}"
        )
    where = f" on mesh {request.only['mesh']}" if "mesh" in request.only else ""
    return f"{key} {wanted} is not possible{where}; {possible}"


def parse_only(text: str) -> dict[str, str]:
    """`"mesh=3x1,zero=3"` as a dict.

    Raises:
        UserError: for another form, and a key that stands twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"--only: {part!r} is not of the form KEY=VALUE, for example zero=3.")
        if key in found:
            raise UserError(f"--only: {key} is given a second time.")
        found[key] = value
    return found

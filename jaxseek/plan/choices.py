"""Which ways there are to run a model on some GPUs. Nothing here imports JAX."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from jaxseek.devices import Fleet
from jaxseek.errors import UserError
from jaxseek.mesh import MeshShape
from jaxseek.run_config import RunConfig

Zero = Literal[0, 1, 2, 3]
Remat = Literal["none", "selective", "full"]
# Larger micro-batches gain nothing any more: products and transfers are long already.
MOST_MICRO_BATCH_TOKENS = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run; `state` and `offload` have one legal value each today."""

    mesh: str
    zero: Zero
    remat: Remat
    state: Literal["float32"] = "float32"
    offload: Literal["none"] = "none"

    def __str__(self) -> str:
        return f"mesh {self.mesh}, ZeRO {self.zero}, remat {self.remat}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes:
        name: of the model, as it was given.
        run: everything that no choice is about: the model, the length of its sequences, dtype,
            optimizer. Its mesh, ZeRO level, remat, batch and accumulation are not looked at.
        micro_batch_tokens: of one micro-batch on one data device, a multiple of the length of a
            sequence; `None` leaves it to the plan.
        tokens_per_step: least tokens of an optimizer step; `None` is one micro-batch each.
        batch: sequences of an optimizer step, exactly; not beside `tokens_per_step`.
        accumulation: micro-batches of a step; `None` leaves it to the plan.
        ram_gib: memory of the host; `None` sets no limit.
        only: what is fixed, by field of `Choice`, as text.
    """

    name: str
    run: RunConfig
    fleet: Fleet
    micro_batch_tokens: int | None = None
    tokens_per_step: int | None = None
    batch: int | None = None
    accumulation: int | None = None
    ram_gib: float | None = None
    only: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        assert self.batch is None or self.tokens_per_step is None
        tokens, length = self.micro_batch_tokens, self.run.seq_len
        if tokens is not None and (tokens < 1 or tokens % length):
            raise UserError(
                f"--batch-per-gpu {tokens} tokens is not a multiple of --seq-len {length}; "
                f"use {max(1, round(tokens / length)) * length}."
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise UserError(f"--tokens-per-step must be at least 1, got {self.tokens_per_step}.")
        if self.accumulation is not None and self.accumulation < 1:
            raise UserError(f"--accumulation must be at least 1, got {self.accumulation}.")
        if self.ram_gib is not None and self.ram_gib <= 0:
            raise UserError(f"--ram must be above 0, got {self.ram_gib:g}GiB.")

    def micro_batches(self, choice: Choice) -> list[int]:
        """Sequences that a micro-batch of one data device may have, in rising order; empty where
        no micro-batch gives the step that is asked for on that mesh.
        """
        most = max(1, MOST_MICRO_BATCH_TOKENS // self.run.seq_len)
        sizes = self._step_sizes(MeshShape.parse(choice.mesh).data, most=most)
        if self.micro_batch_tokens is None:
            return [n for n in sizes if n <= most] or sizes[:1]
        wanted = self.micro_batch_tokens // self.run.seq_len
        if self.batch is not None:
            return [wanted] if wanted in sizes else []
        return [wanted] if self.accumulation is None or wanted >= sizes[0] else []

    def _step_sizes(self, data: int, *, most: int) -> list[int]:
        """Sequences of a micro-batch that fit the step's size; `most` of them where that is open.

        With an accumulation as well a step has one size only, which may be above `most`.
        """
        if self.batch is not None:
            sizes = _divisors(self.batch // data) if self.batch % data == 0 else []
            made = self.accumulation
            return [n for n in sizes if made is None or n * data * made == self.batch]
        if self.tokens_per_step is None:
            return list(range(1, most + 1))
        most_needed = math.ceil(self.tokens_per_step / (self.run.seq_len * data))
        if self.accumulation is not None:
            return [math.ceil(most_needed / self.accumulation)]
        return list(range(1, min(most, most_needed) + 1))

    def steps_accumulation(self, choice: Choice, *, micro_batch: int) -> int:
        """Micro-batches of `micro_batch` sequences of a step."""
        if self.accumulation is not None:
            return self.accumulation
        per_micro_batch = micro_batch * MeshShape.parse(choice.mesh).data
        if self.batch is not None:
            return self.batch // per_micro_batch
        if self.tokens_per_step is not None:
            return math.ceil(self.tokens_per_step / (per_micro_batch * self.run.seq_len))
        return 1

    def run_of(self, choice: Choice, *, micro_batch: int) -> RunConfig:
        """The training run that `choice` with micro-batches of so many sequences stands for."""
        accumulation = self.steps_accumulation(choice, micro_batch=micro_batch)
        return dataclasses.replace(
            self.run,
            mesh=choice.mesh,
            zero=choice.zero,
            remat=choice.remat,
            batch=micro_batch * MeshShape.parse(choice.mesh).data * accumulation,
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
        wanted = str(MeshShape.parse(wanted)) if key == "mesh" else wanted
        values = list(dict.fromkeys(str(getattr(choice, key)) for choice in legal))
        legal = [choice for choice in legal if str(getattr(choice, key)) == wanted]
        if not legal:
            raise UserError(_impossible(key, wanted, values, request=request))
    legal = [choice for choice in legal if request.micro_batches(choice)]
    if not legal:
        raise UserError(_indivisible(request))
    if "zero" in only:
        return legal
    return [choice for choice in legal if choice.zero != 2 or _accumulates(request, choice)]


def _legal(request: Request) -> Iterator[Choice]:
    count = request.fleet.count
    for data in sorted(_divisors(count), reverse=True):
        # With one data device ZeRO splits what the tensor devices would hold whole each.
        levels: tuple[Zero, ...] = (0, 1, 2, 3) if data > 1 else (0, 3) if count > 1 else (0,)
        for zero in levels:
            for remat in get_args(Remat):
                yield Choice(mesh=f"{data}x{count // data}", zero=zero, remat=remat)


def _accumulates(request: Request, choice: Choice) -> bool:
    smallest = request.micro_batches(choice)[0]
    return request.steps_accumulation(choice, micro_batch=smallest) > 1


def _impossible(key: str, wanted: str, values: list[str], *, request: Request) -> str:
    possible = f"possible: {', '.join(values)}."
    if key == "mesh":
        shape = MeshShape.parse(wanted)
        return (
            f"--mesh {shape} has {shape.devices} devices, not those of {request.fleet}; {possible}"
        )
    where = f" on mesh {request.only['mesh']}" if "mesh" in request.only else ""
    return f"{key} {wanted} is not possible{where}; {possible}"


def _indivisible(request: Request) -> str:
    if request.batch is None:
        return (
            f"--batch-per-gpu {request.micro_batch_tokens} tokens and --accumulation "
            f"{request.accumulation} do not make --tokens-per-step {request.tokens_per_step}; "
            "leave one of them out."
        )
    cut = ""
    if request.accumulation is not None:
        cut = f" and accumulation {request.accumulation}"
    if request.micro_batch_tokens is not None:
        cut += f" and {request.micro_batch_tokens} tokens per GPU"
    mesh = request.only.get("mesh", f"any mesh of {request.fleet}")
    return f"batch {request.batch} cannot be cut for {mesh}{cut}; choose another batch."


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


@functools.cache
def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

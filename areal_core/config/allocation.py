"""Allocations: the devices of rollout and training, 'sglang:d4t1+fsdp:d4', and their parser.

allocation := servers "+" trainer | servers "+" ("eval" | "cpu") | colocated | servers | trainer
colocated  := ("embedded" | servers) "|" trainer | ("embedded" | trainer) "|" "eval"
              (embedded: the engine is in the trainer's processes; servers: on its devices, in turn)
eval          nothing is trained: one process samples, or a trainer's ranks measure given rows
servers    := ("sglang" | "vllm") name? (":" | ".") sizes
trainer    := ("fsdp" name? (":" | "."))? sizes
name       := "[" letters "]"                           (parsed and ignored)
sizes      := (letter number)+                          letters d t p c e: data, tensor, pipeline, context (sequence), expert; s means c
"""

import re
from dataclasses import dataclass
from typing import Literal

from areal_core.errors import AllocationError

Kind = Literal["decoupled", "colocated", "train_only", "servers_only", "eval"]
ServerBackend = Literal["sglang", "vllm"]
SERVER_BACKENDS: tuple[ServerBackend, ...] = ("sglang", "vllm")
TOKEN = re.compile(r"(?P<name>\[\w+\])|(?P<word>[a-z_]{2,})|(?P<size>[a-z]\d+)|(?P<mark>.)", re.DOTALL)
DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
SPELLINGS = DIMENSIONS | {"s": "context"}
NOT_BUILT = {
    "megatron": "there is no Megatron engine; use fsdp",
    "archon": "there is no Archon engine; use fsdp",
    "npu": "there is no NPU support; use sglang or vllm, and fsdp",
    "attn": "mixtures of attention and expert layouts need Megatron; use fsdp",
}


@dataclass(frozen=True)
class Parallel:
    """Parallel sizes of rollout or training.

    `data` counts servers, or data-parallel groups of ranks; `context` ranks share the tokens of a
    row.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Total devices; expert parallelism shares the devices of the other dimensions."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        sizes = ((letter, getattr(self, name)) for letter, name in DIMENSIONS.items())
        return "".join(f"{letter}{size}" for letter, size in sizes if letter == "d" or size > 1)


@dataclass(frozen=True)
class Allocation:
    """Sizes and backends of rollout and training; None where a run has no such side."""

    rollout: Parallel | None
    train: Parallel | None
    rollout_backend: ServerBackend | Literal["embedded"] | None
    train_backend: Literal["fsdp"] | None
    kind: Kind

    @property
    def has_servers(self) -> bool:
        """True if rollout is done by inference servers, in processes of their own."""
        return self.rollout_backend in SERVER_BACKENDS

    @property
    def shares_devices(self) -> bool:
        """True if inference servers and the trainer use the same devices, in turn."""
        return self.kind == "colocated" and self.has_servers

    @property
    def num_ranks(self) -> int:
        """Processes that run the script; an evaluation that samples has one."""
        if self.train is not None:
            return self.train.world_size
        return 1 if self.kind == "eval" else 0

    @property
    def trains(self) -> bool:
        """True if weights change during the run."""
        return self.train is not None and self.kind != "eval"

    def for_evaluation(self, samples: bool) -> "Allocation":
        """Return the same rollout engine without a trainer.

        Without `samples`, of a supervised method, the trainer's ranks, which only measure.

        Raises AllocationError if there is no rollout engine.
        """
        if not samples:
            return Allocation(None, self.train or Parallel(), None, "fsdp", "eval")
        if self.rollout is None:
            raise AllocationError(
                f"the allocation {self} has no rollout engine, so nothing can be sampled: give allocation_mode=sglang:d1+eval "
                "or embedded|eval"
            )
        rollout = self.rollout if self.has_servers else Parallel()
        return Allocation(rollout, None, self.rollout_backend, None, "eval")

    @property
    def engine(self) -> str:
        """The rollout side alone: 'sglang:d4', 'embedded' or ''."""
        if self.has_servers:
            return f"{self.rollout_backend}:{self.rollout}"
        return self.rollout_backend or ""

    @property
    def trainer(self) -> str:
        """The training side alone: 'fsdp:d4' or ''."""
        return f"fsdp:{self.train}" if self.train is not None else ""

    def __str__(self) -> str:
        return {
            "decoupled": f"{self.engine}+{self.trainer}",
            "colocated": f"{self.engine}|{self.trainer}",
            "train_only": self.trainer,
            "servers_only": self.engine,
            "eval": f"{self.engine}+eval" if self.has_servers else f"{self.engine or self.trainer}|eval",
        }[self.kind]


def parse_allocation(text: str) -> Allocation:
    """Parse one allocation string.

    Raises AllocationError with the position and the expected token.
    """
    return AllocationParser(re.sub(r" *([+|]) *", r"\1", text.strip())).allocation()


def allocation_from_backends(rollout_backend: str, train_backend: str) -> Allocation:
    """Join two separate strings, 'sglang:d4' or 'embedded' or '', and 'fsdp:d4' or ''.

    Raises AllocationError.
    """
    joint = "|" if rollout_backend.strip() == "embedded" else "+"
    return parse_allocation(
        joint.join(part for part in (rollout_backend.strip(), train_backend.strip()) if part)
    )


def resolve_allocation(allocation_mode: str, rollout_backend: str, actor_backend: str) -> Allocation:
    """Return the allocation of a run: `allocation_mode`, or else the two backends joined.

    Args:
        allocation_mode: the allocation of the run; "" if the backends define it.
        rollout_backend: "sglang:d4", "embedded", "sglang" or "vllm" (next to `allocation_mode`
            only) or "".
        actor_backend: "fsdp:d4", "fsdp" (next to `allocation_mode` only) or "".

    Raises:
        AllocationError: all are empty, one cannot be parsed, or they disagree.
    """
    if not (allocation_mode or rollout_backend or actor_backend):
        raise AllocationError(
            "allocation_mode, rollout.backend and actor.backend are all empty; "
            "give for example allocation_mode='embedded|fsdp:d1' or 'sglang:d1+fsdp:d2'"
        )
    if not allocation_mode:
        return allocation_from_backends(rollout_backend, actor_backend)
    allocation = parse_allocation(allocation_mode)
    # Next to allocation_mode, configs of 2025 name the bare kind of engine, which implies no sizes.
    engine = "" if rollout_backend in SERVER_BACKENDS else rollout_backend
    trainer = "" if actor_backend == "fsdp" else actor_backend
    if not (engine or trainer):
        return allocation
    other = allocation_from_backends(engine or allocation.engine, trainer or allocation.trainer)
    if (other.engine, other.trainer) != (allocation.engine, allocation.trainer):
        raise AllocationError(
            f"allocation_mode is {allocation_mode!r}, but rollout.backend is {engine!r} and "
            f"actor.backend is {trainer!r}; keep one of the two spellings"
        )
    return allocation


class AllocationParser:
    """A cursor over the tokens of one string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(match.lastgroup, match.group(), match.start()) for match in TOKEN.finditer(text)]
        self.next = 0

    def allocation(self) -> Allocation:
        if self.take("embedded"):
            self.expect("|")
            if self.take("eval"):
                return self.end(Allocation(Parallel(), None, "embedded", None, "eval"))
            train = self.trainer()
            # One rank of each data-parallel group samples its rows, with the complete model.
            return self.end(Allocation(Parallel(train.data), train, "embedded", "fsdp", "colocated"))
        backend = next((name for name in SERVER_BACKENDS if self.take(name)), None)
        if backend is None:
            train = self.trainer()
            if not self.take("|"):
                return self.end(Allocation(None, train, None, "fsdp", "train_only"))
            self.expect("eval")
            return self.end(Allocation(None, train, None, "fsdp", "eval"))
        self.separator()
        rollout = self.sizes("dtp", "servers take d, t and p")
        if self.take("|"):
            return self.end(Allocation(rollout, self.trainer(), backend, "fsdp", "colocated"))
        if not self.take("+"):
            return self.end(Allocation(rollout, None, backend, None, "servers_only"))
        if self.take("eval") or self.take("cpu"):
            return self.end(Allocation(rollout, None, backend, None, "eval"))
        return self.end(Allocation(rollout, self.trainer(), backend, "fsdp", "decoupled"))

    def trainer(self) -> Parallel:
        if self.take("fsdp"):
            self.separator()
        return self.sizes("dtcs", "fsdp takes d, t and c; p and e need Megatron, which is not supported")

    def separator(self) -> None:
        """Skip a name in brackets, which is unused, and the ':' or older '.' before the sizes."""
        if self.kind() == "name":
            self.next += 1
        if not (self.take(":") or self.take(".")):
            self.fail("':'")

    def sizes(self, letters: str, rule: str) -> Parallel:
        found: dict[str, int] = {}
        if self.kind() != "size":
            self.fail("sizes such as 'd4' or 'd2t2'")
        while self.kind() == "size":
            _, token, _ = self.tokens[self.next]
            letter, size = token[0], int(token[1:])
            if letter not in SPELLINGS or (letter not in letters and size != 1):
                self.fail(rule)
            if SPELLINGS[letter] in found:
                self.fail(f"each letter once, and {letter!r} was given before")
            if size < 1:
                self.fail("a size of 1 or more")
            found[SPELLINGS[letter]] = size
            self.next += 1
        return Parallel(**found)

    def kind(self) -> str | None:
        return self.tokens[self.next][0] if self.next < len(self.tokens) else None

    def take(self, text: str) -> bool:
        found = self.next < len(self.tokens) and self.tokens[self.next][1] == text
        self.next += found
        return found

    def expect(self, text: str) -> None:
        if not self.take(text):
            self.fail(repr(text))

    def end(self, allocation: Allocation) -> Allocation:
        if self.next < len(self.tokens):
            self.fail("the end")
        return allocation

    def fail(self, expected: str) -> None:
        at_end = self.next >= len(self.tokens)
        token, position = ("", len(self.text)) if at_end else self.tokens[self.next][1:]
        if token in NOT_BUILT:
            raise AllocationError(
                f"allocation {self.text!r}: {token} at character {position + 1}: {NOT_BUILT[token]}"
            )
        found = "the end" if at_end else repr(token)
        raise AllocationError(
            f"allocation {self.text!r}: found {found} at character {position + 1}, expected {expected}; "
            "examples: 'sglang:d1+fsdp:d2', 'embedded|fsdp:d2', 'fsdp:d2', 'sglang:d4'"
        )

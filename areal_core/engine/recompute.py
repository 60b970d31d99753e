"""Compute the gradients of an optimizer step again before it is taken, and compare bits.

    computation 1 ─> sums ┐
    computation 2 ─> sums ┴ differ on any rank? ──no──> the step is taken
                              └yes─> computation 3 ─> two agree: the third is corrupt, and whose device made it
                                                      none do: the computation is not deterministic

Each rank computes its own micro-batches again, or, with `swaps`, rank r computes those of rank
r + 1 (computation 3: r + 2). So a device that is wrong in the same way twice is found, too.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from areal_core.data.batch import Batch
from areal_core.engine.bit_sums import Sums, locate
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.observe_bits import BitSums
from areal_core.engine.ranks import Ranks

Passed = list[list[Sums]]  # of each micro-batch, and last of the step
# (batch, its micro-batches, observer) -> what each gave, as it is computed
Compute = Callable[[Batch, list[list[int]], Callable[..., None]], Iterator[Any]]


@dataclass(frozen=True)
class Fault:
    """The first tensor of a step that was not computed to the same bits each time.

    Attributes:
        ranks: that computed it; several where nothing distinguishes them.
        devices: of these ranks.
        micro_batch: of a rank; None for the sum of gradients over ranks.
        place: the tensor.
        index, bit: of the one wrong element; None where several differ.
        num_different, num_compared: tensors.
    """

    kind: Literal["corruption", "nondeterminism"]
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    micro_batch: int | None
    place: str
    index: tuple[int, ...] | None
    bit: int | None
    num_different: int
    num_compared: int

    def __str__(self) -> str:
        where = "the sum over ranks" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        who = (
            f"rank {' or '.join(map(str, self.ranks))}" if len(self.ranks) < 4 else f"{len(self.ranks)} ranks"
        )
        at = "" if self.index is None else f", element {list(self.index)}"
        at += "" if self.bit is None else f", bit {self.bit}"
        first = f"{where}, {self.place}{at}"
        if self.kind == "corruption":
            on = " or ".join(dict.fromkeys(self.devices))
            return f"{who} ({on}) computed wrongly: {first}; of three computations the other two agree"
        many = f"{self.num_different} of {self.num_compared} tensors differ"
        return f"{who}: three computations gave three results, first in {first}; {many}"


@dataclass(frozen=True)
class Share:
    """What a rank computes in a step: rows, micro-batches, states of random numbers."""

    batch: Batch
    groups: list[list[int]]
    rng: dict[str, str]


@dataclass
class Verification:
    """Collects the sums of an engine's optimizer steps, and computes them again.

    Args:
        recomputes: whether to compute again in the current step.
        swaps: ranks compute each other's micro-batches; keeps a copy of the gradients' shards.
        quietly: a context in which statistics are not recorded.
    """

    ranks: Ranks
    sums: BitSums
    quietly: Callable[[], AbstractContextManager[None]]
    swaps: bool = False
    recomputes: bool = False

    def run(
        self, compute: Compute, batch: Batch, groups: list[list[int]], observe: Callable[..., None]
    ) -> tuple[list[Any], Passed, Fault | None]:
        """Compute gradients, perhaps repeatedly; a collective.

        Returns:
            What `compute` gave the first time, its sums, and what was wrong.
        """
        share = Share(batch, groups, rng_state())
        results, first = self._pass(compute, share, observe)
        if not self.recomputes:
            return results, first, None
        kept = [p.grad for p in self.sums.model.parameters()] if self.swaps else None
        after, fault = rng_state(), None
        size = self.ranks.data_parallel_size
        third = 0 if not self.swaps else 2 if size > 2 else 0
        shifts = (0, int(self.swaps and size > 1), third)
        with self.quietly():
            passes = [first, self._again(compute, share, shifts[1])]
            # A collective, so that all ranks go on alike.
            if self.ranks.maximum(int(self._flat(passes[0]) != self._flat(passes[1]))):
                passes.append(self._again(compute, share, shifts[2]))
                fault = self._judge([self._flat(each) for each in passes], shifts)
        set_rng_state(after)
        if kept is not None:
            for parameter, gradient in zip(self.sums.model.parameters(), kept, strict=True):
                parameter.grad = gradient
        return results, first, fault

    def _pass(self, compute: Compute, share: Share, observe: Callable[..., None]) -> tuple[list[Any], Passed]:
        def observe_loss(event: str, **facts: Any) -> None:
            if event == "loss":
                self.sums.note("log-probs", facts["logprobs"])
                self.sums.note("loss", facts["loss"])
            observe(event, **facts)

        results = []
        with self.sums.collecting():
            for result in compute(share.batch, share.groups, observe_loss):
                results.append(result)
                self.sums.end_micro_batch()
            self.sums.note_reduced()
        return results, self.sums.read()

    def _again(self, compute: Compute, share: Share, shift: int) -> Passed:
        """Compute the share of the rank that is `shift` further; return the sums of this one's."""
        own, size = self.ranks.data_parallel_rank, self.ranks.data_parallel_size
        if shift:
            share = self.ranks.gather_rows(share)[(own + shift) % size]
        set_rng_state(share.rng)
        _, found = self._pass(compute, share, lambda event, **facts: None)
        return self.ranks.gather_rows(found)[(own - shift) % size] if shift else found

    def _flat(self, found: Passed) -> list[tuple[int | None, Sums]]:
        """Return the sums with their micro-batch; with swaps not those of the sum over ranks.

        A sum of the same numbers in the order of other ranks has other bits.
        """
        *micro_batches, reduced = found
        flat: list[tuple[int | None, Sums]] = [
            (number, sums) for number, of_one in enumerate(micro_batches) for sums in of_one
        ]
        return flat if self.swaps else flat + [(None, sums) for sums in reduced]

    def _judge(self, passes: Sequence[list[tuple[int | None, Sums]]], shifts: Sequence[int]) -> Fault | None:
        """Name the first tensor of any rank that differs; a collective."""
        mine = self._own_fault(passes, shifts)
        found = [fault for fault in self.ranks.gather_objects(mine) if fault is not None]
        # What one rank computes wrongly changes the sum on others.
        found = [fault for fault in found if fault[1].micro_batch is not None] or found
        if self.ranks.model_parallel_size > 1:  # ranks of a group exchange activations, too
            first = min((position for position, _ in found), default=0)
            found = [fault for fault in found if fault[0] == first]
        devices = self.ranks.gather_objects(device_identity(self.ranks.device))
        faults = [fault for _, fault in found]
        if not faults:
            return None
        varying = [fault for fault in faults if fault.kind == "nondeterminism"]
        chosen = (varying or faults)[0]
        ranks = sorted({rank for fault in varying or faults for rank in fault.ranks})
        return Fault(
            **vars(chosen) | {"ranks": tuple(ranks), "devices": tuple(devices[rank] for rank in ranks)}
        )

    def _own_fault(
        self, passes: Sequence[list[tuple[int | None, Sums]]], shifts: Sequence[int]
    ) -> tuple[int, Fault] | None:
        """Return the first difference of this rank's share, with its position; None without one."""
        different = [n for n, sums in enumerate(zip(*passes, strict=True)) if len(set(sums)) > 1]
        if not different:
            return None
        pairs = ((0, (1, 2)), (1, (0, 2)), (2, (0, 1)))
        alone = [(odd, a) for odd, (a, b) in pairs if passes[a] == passes[b]]
        size, suspects = self.ranks.data_parallel_size, {0}
        at, place = different[0], passes[0][different[0]]
        element = None
        if alone:
            odd, other = alone[0]
            element = locate(passes[odd][at][1], passes[other][at][1])
            suspects = {shifts[odd]}
            if self.swaps and size == 2 and odd == 1:
                suspects = {0, 1}  # this rank may be wrong in the same way twice
        of = self.ranks.model_parallel_size
        fault = Fault(
            "corruption" if alone else "nondeterminism",
            tuple((self.ranks.rank - shift * of) % self.ranks.world_size for shift in suspects),
            (),
            place[0],
            place[1].place,
            None if element is None else element.index,
            None if element is None else element.bit,
            len(different),
            len(passes[0]),
        )
        return at, fault


def device_identity(device: torch.device) -> str:
    """Return what identifies a device: a GPU's name and UUID, and the host."""
    host = platform.node()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, UUID {properties.uuid}, host {host}"
    return f"{platform.machine()} processor, host {host}"

"""Which rank of a recorded run computed wrongly, by replays that vote.

    record ─┐
    replay ─┼─> numbers of the step, in the order of computation ─> equal?
    replay ─┘     (other processes, other GPUs)

    replays agree, one rank of the record differs   ─> corruption on that rank
    replays agree, every rank differs               ─> another environment, or code
    replays differ from each other, none is alone   ─> nondeterminism

Numbers are those of each rank (losses of micro-batches, inputs of the loss, with
`debug.record_bit_sums` also sums of every output and gradient, which locate one wrong element) and
those of all ranks (gradient norm, checksums of weights). Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from areal_core.engine.bit_sums import Sums, locate, parse_sums
from recorder import Record, RecordedStep
from replayer.check import compare_run, computed
from replayer.compare.stages import files, position
from replayer.errors import ReplayError

Kind = Literal["sound", "corruption", "corruption here", "nondeterminism", "environment", "unclear"]
Confidence = Literal["high", "medium", "low"]
MODELS = {"minibatches": "actor", "critic": "critic"}  # members of a plan
SHARDS = "shards of the weights"
SETTINGS_SHOWN = 4
BEFORE, AFTER = -1, 1 << 30  # in place of a minibatch: inputs of the loss, weights after the step


class Place(NamedTuple):
    """A number of a step: of a rank or of all (None), of a micro-batch or a minibatch (None)."""

    model: str
    minibatch: int
    rank: int | None
    micro_batch: int | None
    what: str
    position: int = 0  # of repeated names


Numbers = dict[Place, str | Sums]  # in the order of computation


@dataclass(frozen=True)
class FaultyReport:
    """Who computed wrongly, and what holds that up.

    Attributes:
        step: the first one that differs; None where none does.
        rank: the data-parallel rank; None where the record does not say.
        place: of the first number that differs; `element` and `bit` of a tensor, None if several
            elements differ.
        device: of the rank, where it is recorded.
        num_different, num_compared: numbers of the step.
        missing: what the record would have to hold to say more.
    """

    record: str
    num_replays: int
    kind: Kind
    confidence: Confidence
    step: int | None = None
    rank: int | None = None
    place: Place | None = None
    element: tuple[int, ...] | None = None
    bit: int | None = None
    device: str | None = None
    num_different: int = 0
    num_compared: int = 0
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: the recorded numbers are those of the replays. 1: they are not. 2: unclear why."""
        return {"sound": 0, "unclear": 2}.get(self.kind, 1)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        place = None if self.place is None else self.place._asdict()
        return asdict(self) | {"place": place}


def find_faulty(record: Record, replay: Callable[[int], Record | None], steps: Sequence[int]) -> FaultyReport:
    """Replay steps of a record at least twice, and judge the first one that differs.

    Args:
        replay: replays them once more, the n-th time, elsewhere than before; None if it fails.
        steps: to compare, ascending.

    Raises:
        ReplayError: a replay failed.
    """
    replays = [replayed(replay, number) for number in range(2)]
    compared = 0
    for step in steps:
        recorded, *found = (numbers_of(each.step(step)) for each in (record, *replays))
        compared += len(recorded)
        if not differing(recorded, found[0]) and not differing(*found):
            continue
        different = differing(recorded, found[0])
        if differing(*found) or locate_first(recorded, found[0], different)["bit"] is None:
            replays.append(replayed(replay, 2))
            found.append(numbers_of(replays[-1].step(step)))
        other = compare_run(record, replays[0].header)
        settings = [
            f"{d.where}: {d.current}, recorded {d.recorded}"
            for d in (*other.config, *other.environment, *other.model)
            if not d.where.endswith("CUDA_VISIBLE_DEVICES")  # replays use the GPUs in other orders
        ]
        if (more := len(settings) - SETTINGS_SHOWN) > 0:
            settings[SETTINGS_SHOWN:] = [f"and {more} more that differ"]
        judged = judge(recorded, found, record.step(step), tuple(settings), is_first=step == steps[0])
        return FaultyReport(
            str(record.path), len(found), step=step, missing=missing(recorded, record), **judged
        )
    return FaultyReport(str(record.path), len(replays), "sound", "high", num_compared=compared)


def replayed(replay: Callable[[int], Record | None], number: int) -> Record:
    found = replay(number)
    if found is None:
        raise ReplayError("the record could not be replayed here: see its replay by `areal-debug replay`")
    return found


def numbers_of(step: RecordedStep) -> Numbers:
    """Return every number that a step computed, in the order of computation."""
    found: Numbers = {}
    inputs = [entry.tensors for _, entry in files(step, "learning")]
    for name in sorted(inputs[0] if inputs else (), key=position):
        for rank, tensors in enumerate(inputs):
            found[Place("actor", BEFORE, rank, None, name)] = tensors[name].crc32c
    ranks = range(step.manifest.num_ranks)
    plans, outcomes = [step.plan(rank).details for rank in ranks], [step.outcome(rank) for rank in ranks]
    for member, model in MODELS.items():
        for minibatch in range(len(plans[0].get(member, ()))):
            updates = [plan[member][minibatch] for plan in plans]
            for rank, update in enumerate(updates):
                *micro_batches, _ = update.get("sums", [()])
                for number, of_one in enumerate(micro_batches):
                    add_sums(found, Place(model, minibatch, rank, number, ""), of_one)
                losses = outcomes[rank].micro_batches if model == "actor" else ()
                for m in losses:
                    if m.minibatch == minibatch:
                        found[Place(model, minibatch, rank, m.micro_batch, "loss", -1)] = m.loss.hex()
            for rank, update in enumerate(updates):
                add_sums(found, Place(model, minibatch, rank, None, ""), update.get("sums", [()])[-1])
            # numbers that all ranks share
            numbers = {name: updates[0][name] for name in ("loss", "grad_norm", "lr")}
            recorded = outcomes[0].minibatches if model == "actor" else ()
            for one in recorded[minibatch : minibatch + 1]:
                numbers |= {f"gradient {name}": value for name, value in one.gradients.items()}
                numbers |= {f"weight {name}": value for name, value in one.weights.items()}
            found.update(
                {Place(model, minibatch, None, None, what): value for what, value in numbers.items()}
            )
    weights, stats = outcomes[0].checksums, outcomes[0].stats
    found |= {Place("actor", AFTER, None, None, f"weight {name}"): value for name, value in weights.items()}
    for model, shards in plans[0].get("shards", {}).items():
        found |= {Place(model, AFTER, rank, None, SHARDS): value for rank, value in enumerate(shards)}
    return found | {
        Place("actor", AFTER, None, None, f"statistic {name}"): float(value).hex()
        for name, value in computed(stats).items()
    }


def add_sums(found: Numbers, place: Place, documents: Sequence[Sequence[Any]]) -> None:
    """Add the sums of a micro-batch, or those of a rank's gradients and weights after the last."""
    for index, document in enumerate(documents):
        sums = parse_sums(document)
        found[place._replace(what=sums.place, position=index)] = sums


def differing(left: Numbers, right: Numbers) -> list[Place]:
    """List the numbers that both have and that differ."""
    return [place for place, value in left.items() if place in right and value != right[place]]


def judge(
    recorded: Numbers,
    replays: Sequence[Numbers],
    step: RecordedStep,
    settings: Sequence[str],
    is_first: bool,
) -> dict[str, Any]:
    """Return the verdict on a step that differs, as members of a report.

    Args:
        is_first: no step before it was compared.
    """
    agreed = replays[0]
    if len(replays) > 2:
        alone = [
            n for n, (a, b) in enumerate([(1, 2), (0, 2), (0, 1)]) if not differing(replays[a], replays[b])
        ]
        if not alone:
            different = differing(*replays[:2]) or differing(*replays[1:])
            ranks = {p.rank for p in different if p.rank is not None}
            said = f"three replays gave three results, on {len(ranks)} rank{'s' * (len(ranks) != 1)}"
            found = locate_first(replays[0], replays[1], different)
            return found | {"kind": "nondeterminism", "confidence": "high", "evidence": (said,), "rank": None}
        agreed = replays[(alone[0] + 1) % 3]
        if not differing(recorded, agreed):
            found = locate_first(replays[alone[0]], agreed, differing(replays[alone[0]], agreed))
            said = f"replay {alone[0] + 1} alone has other bits; the record and the other replays agree"
            return found | {"kind": "corruption here", "confidence": "high", "evidence": (said,)}
    different = differing(recorded, agreed)
    found = locate_first(recorded, agreed, different)
    return found | judge_record(recorded, different, found, step, settings, is_first)


def judge_record(
    recorded: Numbers,
    different: Sequence[Place],
    found: Mapping[str, Any],
    step: RecordedStep,
    settings: Sequence[str],
    is_first: bool,
) -> dict[str, Any]:
    """Return why a record differs from replays that agree."""
    first: Place = found["place"]
    # Later minibatches start from other weights: only the first one says who was wrong.
    group = [p for p in recorded if (p.model, p.minibatch) == (first.model, first.minibatch)]
    own = [p for p in group if p.micro_batch is not None or p[1:5] == (BEFORE, p.rank, None, first.what)]
    of_ranks = own
    if not set(own) & set(different):  # what is summed over ranks, or follows from it
        kind = SHARDS.split()[0] if first.what.startswith("weight") else first.what.split()[0]
        of_ranks = [p for p in recorded if p.rank is not None and p.what.split()[0] == kind
                    and p.minibatch in (first.minibatch, AFTER)]  # fmt: skip
    suspects = {p.rank for p in different if p in set(of_ranks)}
    everyone = {p.rank for p in of_ranks}
    evidence = ("the replays agree with each other, bit for bit", *settings)

    def nobody(kind: Kind, confidence: Confidence, said: str) -> dict[str, Any]:
        return {"kind": kind, "confidence": confidence, "evidence": (said, *evidence), "rank": None}

    if is_everywhere(of_ranks, set(different), found["element"] is not None):
        if not is_first or first.minibatch > 0:  # the same kernels gave the recorded bits before
            said = "all ranks have other bits from here on, and not before: they start from other weights"
            return nobody("unclear", "low", said)
        said = f"every {'rank' if len(everyone) > 1 else 'micro-batch'} has other bits from the start"
        return nobody("environment", "high" if settings else "medium", said)
    gradients = [p for p in group if p.what.startswith("gradient ") and p.rank is None]
    few = 0 < 2 * len(set(gradients) & set(different)) < len(gradients)
    if not suspects and not few:
        return nobody("unclear", "low", "no number that a rank computes by itself differs")
    rank = next(iter(suspects)) if len(suspects) == 1 else None
    if rank is not None and len(everyone) > 1:
        evidence = ("there every other rank has the recorded bits", *evidence)
    return {
        "kind": "corruption",
        "confidence": "high" if rank is not None and not settings else "medium",
        "rank": rank,
        "device": None if rank is None else step.plan(rank).details.get("device"),
        "evidence": evidence,
    }


def is_everywhere(places: Sequence[Place], different: set[Place], is_one_element: bool) -> bool:
    """Return whether what ranks compute differs on all of them, as with other kernels.

    With one rank: in all its micro-batches and most numbers, and not in one element.
    """
    ranks = {p.rank for p in places}
    if len(ranks) > 1:
        return ranks == {p.rank for p in places if p in different}
    found = [p for p in places if p in different]
    micro_batches = {p.micro_batch for p in places} == {p.micro_batch for p in found}
    return micro_batches and 2 * len(found) > len(places) and not is_one_element


def locate_first(left: Numbers, right: Numbers, different: Sequence[Place]) -> dict[str, Any]:
    """Return the first place that differs, and its one wrong element if it is one."""
    first = different[0]
    one, other = left[first], right[first]
    element = locate(one, other) if isinstance(one, Sums) and isinstance(other, Sums) else None
    return {
        "place": first,
        "rank": first.rank,
        "element": None if element is None else element.index,
        "bit": None if element is None else element.bit,
        "num_different": len(different),
        "num_compared": len(left),
    }


def missing(recorded: Numbers, record: Record) -> tuple[str, ...]:
    """Return what a record would need to say more, a sentence each."""
    lacks = []
    if not any(isinstance(value, Sums) for value in recorded.values()):
        lacks.append(
            "debug.record_bit_sums=true names the layer, tensor and bit, and the rank of a wrong gradient"
        )
    if not any(place.minibatch == BEFORE for place in recorded):
        lacks.append("debug.dump_scope=full records the log-probs before the update, too")
    return tuple(lacks)

"""Find where two recordings of one step diverge, by its stages in the order of computation.

    batch ─> logprobs ─> advantages ─> [ loss ─> gradient ─> weights ] for each minibatch, a critic's after the actor's

The first difference in this order is the one to explain; later ones may follow from it. A tensor's
difference names row, token and size. Rows are matched over all ranks, so records with different
numbers of ranks can be compared: ours by prompt and sample; those of other trainers, which number
prompts as they like, by what they contain. Tensors whose checksums in step.json are
equal are not read.

What another trainer did not give is unknown, and differs from nothing: a tensor of one side only, a
row whose bit is set, NaN in a tensor of that trainer. Its statistics have its own names.
"""

import re
import tomllib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from recorder import MicroBatch, Outcome, Plan, RecordedStep
from recorder.conversations import conversations
from recorder.format import IMAGE_KEYS, OTHER_TRAINER_KEYS, BatchEntry, TensorEntry
from recorder.tables.columns import prompt_lengths
from replayer.compare.inputs import describe, differing_result, pictures_of

STAGES = ("batch", "logprobs", "advantages", "loss", "gradient", "weights")
OF_ADVANTAGES = re.compile(r"ppo_actor/(?!update/)")  # statistics

# of a "learning" file, what does not follow from rewards; log-probs are 0 where the mask is
LOGPROBS = ("loss_mask", "prox_logp", "ref_logp", "teacher_logp", "values", "entropy")
NOT_COMPARED = {"cu_seqlens", "prompt_id", "sample_id", *OTHER_TRAINER_KEYS, *IMAGE_KEYS}
# last word of a statistic of another trainer -> its stage
STAGE_OF_STATISTIC = dict.fromkeys(("loss", "pg_loss", "policy_loss"), "loss") | {"grad_norm": "gradient"}
ORDER: list[str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["order"]


@dataclass(frozen=True)
class Place:
    """A row of a step, and a token of it (None: a value of the row).

    `rank` and `row` are of the left record, `right` those of the other one, None unless both have
    the row. `in_prompt`: the token precedes the first one in the loss mask.
    """

    rank: int
    row: int
    prompt_id: int
    sample_id: int
    token: int | None = None
    in_prompt: bool = False
    right: tuple[int, int] | None = None


@dataclass(frozen=True)
class StageDifference:
    """A tensor or a value that differs, and the stage that computes it.

    Attributes:
        left, right: the first values that differ; None if absent.
        num_different, num_compared: elements that differ in bits, of how many.
        largest: the largest absolute difference; None unless they are floats.
        place: where `left` and `right` are; None outside the rows of a batch.
        minibatch: the minibatch of a loss, gradient or weight.
    """

    stage: str
    name: str
    left: Any
    right: Any
    num_different: int = 1
    num_compared: int = 1
    largest: float | None = None
    place: Place | None = None
    minibatch: int | None = None


@dataclass(frozen=True)
class RowSpan:
    """Position of a row in its rank's flat tensors; the prompt has `prompt_length` tokens."""

    rank: int
    row: int
    begin: int
    end: int
    prompt_length: int
    prompt_id: int
    sample_id: int

    def slice(self, arrays: Sequence[np.ndarray], per_token: bool) -> np.ndarray:
        """Return the row's tokens, or its one value, from an array per rank."""
        begin, end = (self.begin, self.end) if per_token else (self.row, self.row + 1)
        return arrays[self.rank][begin:end]


Rows = dict[tuple[int, int], RowSpan]
Content = tuple[Hashable, Hashable]  # of a row: all of it, and its prompt
Files = list[tuple[str, BatchEntry]]
Described = Callable[[], tuple[str | None, str | None]]  # what each side has
Foreign = tuple[bool, bool]
Update = dict[str, float]  # loss (of all ranks), grad_norm and lr of an optimizer step


@dataclass(frozen=True)
class Side:
    """A tensor of a step: its rows, and an array and the rows with known values of each rank."""

    rows: Rows
    arrays: Sequence[np.ndarray]
    known: Sequence[np.ndarray]
    is_foreign: bool

    def values(self, name: tuple[int, int], per_token: bool) -> np.ndarray | None:
        """Return the values of a row, None if they are unknown."""
        row = self.rows[name]
        return row.slice(self.arrays, per_token) if self.known[row.rank][row.row] else None

    def unknown(self, values: np.ndarray) -> np.ndarray:
        """Return which values, bool [n, ...], another trainer did not know."""
        return (
            np.isnan(values) if self.is_foreign and values.dtype.kind == "f" else np.zeros(values.shape, bool)
        )


def compare_steps(
    left: RecordedStep, right: RecordedStep, foreign: Foreign = (False, False)
) -> tuple[StageDifference, ...]:
    """List all differences of two recordings of a step, in the order of computation.

    Args:
        foreign: whether the left and the right record are of another trainer.

    Raises DamagedRecord.
    """
    batch = list(compare_tensors(left, right, "batch", foreign))
    learning = list(compare_tensors(left, right, "learning", foreign))
    learning.sort(key=lambda difference: STAGES.index(difference.stage))
    here, there = read_outcomes(left), read_outcomes(right)
    if not here or not there:
        return (*batch, *learning)
    sums = here[0].checksums, there[0].checksums
    weights = () if any(foreign) and not all(sums) else compare_checksums("weights", *sums)
    if any(foreign):
        return (*batch, *learning, *compare_logged(here[0].stats, there[0].stats), *weights)
    if not files(left, "learning") or not files(right, "learning"):
        own, other = here[0].stats, there[0].stats
        shared = [name for name in own if name in other and OF_ADVANTAGES.match(name)]
        compared = (("advantages", f"statistic {name}", own[name], other[name]) for name in shared)
        learning = [found for given in compared for found in compare_numbers(*given)]
    plans = left.plan(0), right.plan(0)
    actors = compare_updates(here, there, *(parse_updates(plan, "minibatches") for plan in plans))
    critics = compare_critics(*(parse_updates(plan, "critic") for plan in plans))
    return (*batch, *learning, *actors, *critics, *weights)


def compare_tensors(
    left: RecordedStep, right: RecordedStep, kind: str, foreign: Foreign
) -> Iterator[StageDifference]:
    here, there = files(left, kind), files(right, kind)
    if not here or not there:
        return
    keys = {key: None for _, entry in (here[0], there[0]) for key in entry.tensors}
    suspects = {key for key in keys if tensor_entries(here, key) != tensor_entries(there, key)}
    if not suspects:
        return
    if any(foreign):
        suspects = set(keys)  # equal tensors may belong to rows in another order
    rows, other_rows = paired = paired_rows(left, right, foreign)
    if kind == "batch":
        yield from compare_rows(rows, other_rows, in_order=not any(foreign))
        if suspects & IMAGE_KEYS.keys():
            yield from compare_images(left, right, rows, other_rows)
        if "input_ids" in suspects:
            yield from compare_tool_results(left, right, rows, other_rows)
    for key in sorted(suspects - NOT_COMPARED, key=position):
        entries = tensor_entries(here, key)[0], tensor_entries(there, key)[0]
        if entries[0] is None or entries[1] is None:
            dtypes = [entry and entry.dtype for entry in entries]
            # records of earlier versions lack the aligned mask
            if not any(foreign) and (kind, key) != ("learning", "loss_mask"):
                yield StageDifference(stage_of(kind, key), key, left=dtypes[0], right=dtypes[1])
            continue
        sides = sides_of((left, right), kind, key, paired, foreign)
        yield from compare_tensor(stage_of(kind, key), key, *sides, entries[0].axis == "token")


def sides_of(
    steps: tuple[RecordedStep, RecordedStep], kind: str, key: str, rows: tuple[Rows, Rows], foreign: Foreign
) -> tuple[Side, Side]:
    """Read a tensor of every rank of both recordings of a step, which both have."""
    one, other = (
        side_of(step, kind, key, of_step, is_foreign, any(foreign))
        for step, of_step, is_foreign in zip(steps, rows, foreign, strict=True)
    )
    return one, other


def side_of(step: RecordedStep, kind: str, key: str, rows: Rows, is_foreign: bool, any_foreign: bool) -> Side:
    """Read a tensor of every rank of a step.

    Beside another trainer's record, a log-prob of 0 outside of the loss mask is not known: older
    versions stored 0 there, whatever was given, as our trainer does.
    """
    # learning-* has no bits: a row that lacks a name is NaN
    asked = key if kind == "batch" else "cu_seqlens"
    known = [step.known(rank, asked) for rank in range(step.manifest.num_ranks)]
    arrays = [step.tensors(name, entry, [key])[key] for name, entry in files(step, kind)]
    if key == "logprobs" and any_foreign:
        masks = [step.batch(rank, ["loss_mask"])["loss_mask"] for rank in range(len(arrays))]
        arrays = [
            np.where((mask == 0) & (array == 0), np.nan, array).astype(array.dtype)
            for mask, array in zip(masks, arrays, strict=True)
        ]
        is_foreign = True
    return Side(rows, arrays, known, is_foreign)


def stages_shared(left: RecordedStep, right: RecordedStep) -> set[str]:
    both = [{key for _, entry in files(step, "learning") for key in entry.tensors} for step in (left, right)]
    shared = {"batch", *(stage_of("learning", key) for key in both[0] & both[1] - NOT_COMPARED)}
    outcomes = read_outcomes(left), read_outcomes(right)
    if all(outcomes):
        here, there = (of_ranks[0] for of_ranks in outcomes)
        shared |= {
            STAGE_OF_STATISTIC.get(name.split("/")[-1], "batch") for name in here.stats.keys() & there.stats
        }
        shared |= {"weights"} if here.checksums and there.checksums else set()
    return shared


def stage_of(kind: str, name: str) -> str:
    """Return the stage that computes a tensor of a "batch" or "learning" file."""
    if kind == "batch":
        return "batch"
    if name == "current_logp":  # of TRL: of the weights of each micro-batch
        return "loss"
    return "logprobs" if name in LOGPROBS else "advantages"


def files(step: RecordedStep, kind: str) -> Files:
    """Name and entry of each rank's file of a kind; empty if the kind was not recorded."""
    names = [step.rank_name(kind, rank, "safetensors") for rank in range(step.manifest.num_ranks)]
    return [(name, step.manifest.batches[name]) for name in names if name in step.manifest.batches]


def tensor_entries(entries: Files, key: str) -> list[TensorEntry | None]:
    """Return every rank's entry of a tensor in step.json: equal entries mean equal bytes."""
    return [({key: None} | entry.tensors)[key] for _, entry in entries]


def position(key: str) -> tuple[int, str]:
    """Sort key of a tensor in the order of computation."""
    return (ORDER.index(key) if key in ORDER else len(ORDER), key)


def find_rows(step: RecordedStep) -> Rows:
    """Return every row of a step by (prompt_id, sample_id), in the order of ranks and rows."""
    rows: Rows = {}
    for rank in range(step.manifest.num_ranks):
        given = ["prompt_length"] if "prompt_length" in step.batch_entry(rank)[1].tensors else []
        arrays = step.batch(rank, ("cu_seqlens", "prompt_id", "sample_id", "loss_mask", *given))
        bounds, lengths = arrays["cu_seqlens"].tolist(), prompt_lengths(step, rank, arrays).values.tolist()
        names = zip(arrays["prompt_id"].tolist(), arrays["sample_id"].tolist(), strict=True)
        for row, name in enumerate(names):
            rows[name] = RowSpan(rank, row, bounds[row], bounds[row + 1], lengths[row], *name)
    return rows


def paired_rows(left: RecordedStep, right: RecordedStep, foreign: Foreign) -> tuple[Rows, Rows]:
    """Return the rows of both steps, under one name where they are the same."""
    return match_rows(left, right) if any(foreign) else (find_rows(left), find_rows(right))


def match_rows(left: RecordedStep, right: RecordedStep) -> tuple[Rows, Rows]:
    """Return the rows of both steps; rows with the same content are under the left one's name.

    A row of the right step without a partner is under a name that no other row has.
    """
    here, there = find_rows(left), find_rows(right)
    content = text_of if any(map(lacks_tokens, (left, right))) else tokens_of
    keys, others = content(left, here), content(right, there)
    has_roles = left.is_given and right.is_given  # the samples of a pair: the chosen and the rejected answer
    partners: dict[tuple[int, int], tuple[int, int]] = {}  # right -> left
    for kind in (0, 1):  # of content: all of it, the prompt
        taken = set(partners.values())
        free: dict[Hashable, deque[tuple[int, int]]] = defaultdict(deque)
        for name in here:
            if name not in taken:
                free[keys[name][kind], has_roles and name[1]].append(name)
        for name in there:
            if name not in partners and (same := free[others[name][kind], has_roles and name[1]]):
                partners[name] = same.popleft()
    alone = [name for name in there if name not in partners]
    names = partners | {name: (-1 - number, 0) for number, name in enumerate(alone)}
    return here, {names[name]: row for name, row in there.items()}


def lacks_tokens(step: RecordedStep) -> bool:
    return not all(step.known(rank, "input_ids").all() for rank in range(step.manifest.num_ranks))


def tokens_of(step: RecordedStep, rows: Rows) -> dict[tuple[int, int], Content]:
    """Return the tokens of each row, and those of its prompt."""
    ids = [step.batch(rank, ["input_ids"])["input_ids"] for rank in range(step.manifest.num_ranks)]
    found = {name: row.slice(ids, per_token=True) for name, row in rows.items()}
    return {
        name: (found[name].tobytes(), found[name][: row.prompt_length].tobytes())
        for name, row in rows.items()
    }


def text_of(step: RecordedStep, rows: Rows) -> dict[tuple[int, int], Content]:
    """Return the text of each row, and that of its prompt; without text its place."""
    texts = [step.text(rank) for rank in range(step.manifest.num_ranks)]

    def content(row: RowSpan) -> Content:
        lines = texts[row.rank]
        if lines is None:
            return (row.rank, row.row), (row.rank, row.row)
        line = lines[row.row]
        return (line["prompt"], line["completion"]), line["prompt"]

    return {name: content(row) for name, row in rows.items()}


def prompts_of(*steps: RecordedStep, part: int = 1) -> list[dict[tuple[int, int], Hashable]]:
    """Return the prompts of each step by row, or of `part` 0 the rows: tokens, or text if any step lacks tokens."""
    content = text_of if any(map(lacks_tokens, steps)) else tokens_of
    return [{name: key[part] for name, key in content(step, find_rows(step)).items()} for step in steps]


def compare_rows(left: Rows, right: Rows, in_order: bool) -> Iterator[StageDifference]:
    """Yield rows that only one side has, or, if `in_order`, that come in another order."""
    union = {**left, **right}
    alone = [name for name in union if name not in left or name not in right]
    if alone:
        sides = ["present" if alone[0] in rows else None for rows in (left, right)]
        place = place_of(union[alone[0]])
        yield StageDifference("batch", "rows", sides[0], sides[1], len(alone), len(union), place=place)
    elif in_order and list(left) != list(right):
        moved = [(name, other) for name, other in zip(left, right, strict=True) if name != other]
        name, other = moved[0]
        yield StageDifference(
            "batch", "order of rows", name, other, len(moved), len(left), place=place_of(left[name])
        )


def compare_images(
    left: RecordedStep, right: RecordedStep, rows: Rows, other_rows: Rows
) -> Iterator[StageDifference]:
    """Yield the difference of pictures in the rows that both sides have, with the first one."""

    def differing(one: Sequence[Any], other: Sequence[Any]) -> tuple[list[Described], int]:
        pairs = list(zip_longest(one, other))
        different = [(number, a, b) for number, (a, b) in enumerate(pairs) if a != b]
        return [partial(describe, *one, (left, right)) for one in different], len(pairs)

    yield from compare_contents("images", (left, right), (rows, other_rows), pictures_of, differing)


def compare_tool_results(
    left: RecordedStep, right: RecordedStep, rows: Rows, other_rows: Rows
) -> Iterator[StageDifference]:
    """Yield the first row in which a tool returned something else, and in how many it did."""

    def differing(one: Any, other: Any) -> tuple[list[Described], int]:
        found = differing_result(one, other)
        return [] if found is None else [lambda: found], 1

    yield from compare_contents("tool result", (left, right), (rows, other_rows), conversations, differing)


def compare_contents(
    name: str,
    steps: Sequence[RecordedStep],
    rows: tuple[Rows, Rows],
    read: Callable[[RecordedStep, int], Sequence[Any] | None],
    differing: Callable[[Any, Any], tuple[list[Described], int]],
) -> Iterator[StageDifference]:
    """Yield the difference of what `read` returns of each row of a rank, with the first one.

    `differing` returns what differs in a row, and of how many.
    """
    here, there = ([read(step, rank) for rank in range(step.manifest.num_ranks)] for step in steps)
    first, num_different, num_compared = None, 0, 0
    for row, other in [(row, rows[1][name]) for name, row in rows[0].items() if name in rows[1]]:
        one, two = here[row.rank], there[other.rank]
        if one is None or two is None:
            continue
        found, number = differing(one[row.row], two[other.row])
        num_different, num_compared = num_different + len(found), num_compared + number
        if found and first is None:
            first = place_of(row, right=other), found[0]()
    if first is not None:
        place, texts = first
        yield StageDifference("batch", name, *texts, num_different, num_compared, place=place)


def place_of(row: RowSpan, token: int | None = None, right: RowSpan | None = None) -> Place:
    in_prompt = token is not None and token < row.prompt_length
    other = None if right is None else (right.rank, right.row)
    return Place(row.rank, row.row, row.prompt_id, row.sample_id, token, in_prompt, other)


def compare_tensor(
    stage: str, key: str, left: Side, right: Side, per_token: bool
) -> Iterator[StageDifference]:
    found: list[StageDifference] = []
    num_different, num_compared = 0, 0
    for name in [name for name in left.rows if name in right.rows]:
        a, b = left.values(name, per_token), right.values(name, per_token)
        if a is None or b is None:
            continue
        different, largest = differing_elements(a, b, left.unknown(a), right.unknown(b))
        num_different, num_compared = num_different + len(different), num_compared + max(len(a), len(b))
        if len(different):
            index = int(different[0])
            place = place_of(left.rows[name], index if per_token else None, right.rows[name])
            values = value_at(a, index), value_at(b, index)
            found.append(StageDifference(stage, key, *values, largest=largest, place=place))
    if found:
        sizes = [one.largest for one in found if one.largest is not None]
        yield replace(
            found[0],
            num_different=num_different,
            num_compared=num_compared,
            largest=max(sizes, default=None),
        )


def differing_elements(
    left: np.ndarray, right: np.ndarray, unknown_left: np.ndarray, unknown_right: np.ndarray
) -> tuple[np.ndarray, float | None]:
    """Return indices at which two rows differ in bits, and the largest float difference.

    `unknown_left` and `unknown_right` are bool, in the shape of the rows: unknown values.
    """
    shared = min(len(left), len(right))
    a, b = left[:shared], right[:shared]
    unequal = a != b if a.dtype != b.dtype else bits(a) != bits(b)
    unequal &= ~(unknown_left[:shared] | unknown_right[:shared])
    indices = np.flatnonzero(unequal.any(axis=tuple(range(1, unequal.ndim))))
    beyond = np.arange(shared, max(len(left), len(right)))
    if a.dtype.kind != "f" or not len(indices):
        return np.concatenate([indices, beyond]), None
    gaps = np.abs(a[indices].astype(np.float64) - b[indices].astype(np.float64))
    return np.concatenate([indices, beyond]), float(gaps.max())


def bits(array: np.ndarray) -> np.ndarray:
    """Return the array's bits as integers: 0.0 is not -0.0, and NaN equals NaN."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "f" else array


def value_at(array: np.ndarray, index: int) -> Any:
    """Return an element as a Python number, None beyond the end."""
    return array[index].tolist() if index < len(array) else None


def read_outcomes(step: RecordedStep) -> list[Outcome]:
    """Read the outcome of each rank; empty if outcomes were not recorded."""
    recorded = step.rank_name("outcome", 0, "json") in step.manifest.files
    return [step.outcome(rank) for rank in range(step.manifest.num_ranks)] if recorded else []


def parse_updates(plan: Plan, member: str) -> list[Update]:
    """Parse the optimizer steps in the plan's `member`: "minibatches" (actor) or "critic".

    Empty if the member is absent.
    """
    documents = plan.details.get(member, [])
    return [{name: float.fromhex(item[name]) for name in ("loss", "grad_norm", "lr")} for item in documents]


def compare_logged(left: Mapping[str, float], right: Mapping[str, float]) -> Iterator[StageDifference]:
    shared = [(name, STAGE_OF_STATISTIC.get(name.split("/")[-1])) for name in left if name in right]
    for wanted in ("loss", "gradient"):
        for name in [name for name, stage in shared if stage == wanted]:
            yield from compare_numbers(wanted, f"statistic {name}", left[name], right[name])


def compare_numbers(
    stage: str, name: str, left: float | None, right: float | None, minibatch: int | None = None
) -> Iterator[StageDifference]:
    one, other = (number if number is None else float(number).hex() for number in (left, right))
    if one != other:
        largest = None if left is None or right is None else abs(left - right)
        yield StageDifference(stage, name, left, right, largest=largest, minibatch=minibatch)


def compare_updates(
    here: Sequence[Outcome], there: Sequence[Outcome], updates: Sequence[Update], others: Sequence[Update]
) -> Iterator[StageDifference]:
    ran = [m.minibatch + 1 for outcome in (*here, *there) for m in outcome.micro_batches]
    for minibatch in range(max([0, *ran])):
        # other ranks have other micro-batches, whose losses cannot be compared
        if len(here) == len(there):
            for rank, (left, right) in enumerate(zip(here, there, strict=True)):
                yield from compare_losses(rank, minibatch, left, right)
        own, other = (u[minibatch] if minibatch < len(u) else None for u in (updates, others))
        if own and other:
            yield from compare_numbers(
                "gradient", "grad_norm", own["grad_norm"], other["grad_norm"], minibatch
            )
        recorded = zip(here[0].minibatches[minibatch:], there[0].minibatches[minibatch:], strict=False)
        pair = next(recorded, None)
        if pair:
            yield from compare_checksums("gradient", pair[0].gradients, pair[1].gradients, minibatch)
        if own and other:
            yield from compare_numbers("weights", "lr", own["lr"], other["lr"], minibatch)
        if pair:
            yield from compare_checksums("weights", pair[0].weights, pair[1].weights, minibatch)


def compare_critics(updates: Sequence[Update], others: Sequence[Update]) -> Iterator[StageDifference]:
    for minibatch, (left, right) in enumerate(zip_longest(updates, others)):
        for stage, fact in (("loss", "loss"), ("gradient", "grad_norm"), ("weights", "lr")):
            own, other = (None if one is None else one[fact] for one in (left, right))
            yield from compare_numbers(stage, f"{fact} of the critic", own, other, minibatch)


def in_minibatch(outcome: Outcome, minibatch: int | None) -> list[MicroBatch]:
    return [one for one in outcome.micro_batches if one.minibatch == minibatch]


def compare_losses(rank: int, minibatch: int, left: Outcome, right: Outcome) -> Iterator[StageDifference]:
    sides = [in_minibatch(outcome, minibatch) for outcome in (left, right)]
    for number, (a, b) in enumerate(zip_longest(*sides)):
        name = f"rank {rank}, micro-batch {number}"
        rows, other_rows = (None if one is None else one.rows for one in (a, b))
        if rows != other_rows:
            yield StageDifference("loss", f"rows of {name}", rows, other_rows, minibatch=minibatch)
        for fact in ("num_tokens", "weight", "loss"):
            numbers = getattr(a, fact, None), getattr(b, fact, None)  # None: it is not there
            yield from compare_numbers("loss", f"{fact} of {name}", *numbers, minibatch)


def compare_checksums(
    stage: str, left: Mapping[str, str], right: Mapping[str, str], minibatch: int | None = None
) -> Iterator[StageDifference]:
    """Yield the first parameter, in the model's order, whose checksum differs, and how many do."""
    names = list({**left, **right})
    different = [name for name in names if name not in left or name not in right or left[name] != right[name]]
    if different:
        sides = [({different[0]: None} | dict(side))[different[0]] for side in (left, right)]
        yield StageDifference(
            stage, different[0], sides[0], sides[1], len(different), len(names), minibatch=minibatch
        )

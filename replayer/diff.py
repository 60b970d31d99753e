"""Find where two records diverge (step, stage), and which settings explain it.

    records ─> first step with other bits ─> its differences in the order of computation ─┐
    headers ─> options, environment, model files that differ ─────────────────────────────┴─> verdict

An option explains a difference only if it acts at that stage or before it: a learning rate cannot
change the batch of a step that started from equal weights. Options of another trainer are compared
by name, and only with options of the same trainer: nothing is known of where they act. What one
side does not know, be it a value, the config or the machine, is listed and explains nothing.
"""

import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recorder import Record, RecordedStep
from recorder.difference import Difference
from recorder.format import RecordHeader
from recorder.reader import read_end
from recorder.verify import check_step
from replayer.check import WITHOUT_EFFECT, HeaderComparison, compare_headers
from replayer.compare.stages import STAGES, StageDifference, compare_steps, prompts_of, stages_shared
from replayer.errors import ReplayError
from replayer.own_code import FIRST_STAGE, compare_own_code
from replayer.step_weights import WEIGHTS

# options that change no number of a run; a replay ignores more options, as it has no engine
WITHOUT_NUMBERS = WITHOUT_EFFECT - {"allocation_mode", "rollout", "sglang", "vllm"}
MODEL_PATHS = ("actor.path", "tokenizer_path")
# steps in which a prompt is looked for that two records share: another order is in the same epoch
SEARCHED_FOR_PROMPTS = 20
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
INPUTS: dict[str, str] = TABLE["inputs"]
# largest effect of summation order at this precision, relative to 1 or to the value
NOISE = {"float32": 64 * 2.0**-23, "bfloat16": 64 * 2.0**-8, "float16": 64 * 2.0**-10}


@dataclass(frozen=True)
class Verdict:
    """Cause of a divergence; `reasons` are the settings that explain it.

    `cause` is "own code", "configuration", "input", "environment", "kernel noise" or
    "unknown".
    """

    cause: str
    why: str
    reasons: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class DiffReport:
    """Difference of two records. `step` is the first that differs, None if no compared step does.

    `num_compared` of the `num_shared` steps that both have were compared; "same" cannot mean
    "nothing compared". `not_known` are the values that one side does not know, a phrase each.
    `by_checksums`: bytes whose recorded checksums are equal were not read.
    """

    left: str
    right: str
    num_compared: int
    num_shared: int
    only_left: tuple[int, ...]
    only_right: tuple[int, ...]
    set_differently: HeaderComparison
    step: int | None
    differences: tuple[StageDifference, ...]
    verdict: Verdict | None
    not_compared: tuple[str, ...]
    not_known: tuple[str, ...] = ()
    unrelated: str | None = None
    by_checksums: bool = False

    @property
    def same(self) -> bool:
        """True if every compared step is the same in every bit."""
        return self.step is None

    @property
    def first(self) -> StageDifference | None:
        """The first difference in the order of computation."""
        return self.differences[0] if self.differences else None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {"same": self.same, "stage": self.first and self.first.stage} | asdict(self)


def diff_records(
    left: Record,
    right: Record,
    step: int | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    fast: bool = False,
) -> DiffReport:
    """Compare two records step by step up to the first that differs, or one step only.

    Every byte of the compared steps is read and checked: what is called the same was seen.

    Args:
        left: a record.
        right: the other one.
        step: compare only this one.
        on_step: called with the number of each step after its comparison.
        fast: compare the checksums in step.json where they are equal, and not the bytes.

    Raises:
        ReplayError: the records have no step in common.
        StepNotRecorded: one of them lacks `step`.
        DamagedRecord: bytes differ from those written.
    """
    shared = common_steps(left, right) if step is None else [step]
    foreign = left.header.trainer is not None, right.header.trainer is not None
    differences: tuple[StageDifference, ...] = ()
    unknown: dict[str, Counter[str]] = {"A": Counter(), "B": Counter()}
    num_compared = 0
    without_images = [
        f"pictures in {side}" for side, one in (("A", left), ("B", right)) if one.header.lacks_images
    ]
    for record in () if fast else (left, right):
        read_end(record.storage)
    for number in shared:
        here, there = (
            record.step(number) if fast else check_step(record, number) for record in (left, right)
        )
        differences = compare_steps(here, there, foreign)
        if without_images:
            differences = tuple(one for one in differences if one.name != "images")
        for side, one in (("A", here), ("B", there)):
            ranks = range(one.manifest.num_ranks)
            unknown[side].update(one.num_unknown() | {"": sum(map(one.num_rows, ranks))})
        num_compared += 1
        on_step(number)
        if differences:
            break
    header = settings_that_differ(left, right)
    verdict = None
    if differences:
        differences = settle_stage(differences, header)
        config = left.header.config if right.header.config else {}
        trainers = left.header.trainer, right.header.trainer
        verdict = judge_own_code(left, right, differences[0]) or judge_difference(
            differences[0], header, config, trainers
        )
    return DiffReport(
        left=left.path,
        right=right.path,
        num_compared=num_compared,
        num_shared=len(common_steps(left, right)),
        only_left=tuple(sorted(set(left.steps) - set(right.steps))),
        only_right=tuple(sorted(set(right.steps) - set(left.steps))),
        set_differently=header,
        step=number if differences else None,
        differences=differences,
        verdict=verdict,
        not_compared=stages_not_recorded(left, right, here, there),
        not_known=(
            *unknown_values(unknown),
            *without_images,
            *unknown_settings(left.header, right.header),
        ),
        unrelated=why_unrelated(left, right, shared) if differences else None,
        by_checksums=fast,
    )


def common_steps(left: Record, right: Record) -> list[int]:
    """Return the steps that both records have, ascending. Raises ReplayError if there are none."""
    found = sorted(set(left.steps) & set(right.steps))
    if not found:
        raise ReplayError(f"{left.path} and {right.path} have no step in common: there is nothing to compare")
    return found


def why_unrelated(left: Record, right: Record, steps: Sequence[int]) -> str | None:
    """Return why two records are of different experiments, None if nothing says so.

    They are if no prompt of their first common steps is in both, and another model was trained, or
    it is not known which.
    """
    if share_a_prompt(left, right, steps):
        return None
    files = [side.header.model["files"].items() for side in (left, right)]
    sizes = [sum(entry["size_bytes"] for name, entry in of if name.endswith(WEIGHTS)) for of in files]
    if all(sizes):
        model = "models of other sizes" if sizes[0] != sizes[1] else None
    elif left.header.config_is_ours and right.header.config_is_ours:
        paths = [Path(side.header.model["path"]).name for side in (left, right)]
        model = f"other models ({paths[0]}, {paths[1]})" if paths[0] != paths[1] else None
    else:
        model = "nothing shows that the model was the same"
    return None if model is None else f"no prompt of one is in the other, and {model}"


def share_a_prompt(left: Record, right: Record, steps: Sequence[int]) -> bool:
    """Return whether a prompt of the first of these steps is in both records, in any step."""
    seen: tuple[set[Hashable], set[Hashable]] = (set(), set())
    for step in steps[:SEARCHED_FOR_PROMPTS]:
        for prompts, of_step in zip(seen, prompts_of(left.step(step), right.step(step)), strict=True):
            prompts.update(of_step.values())
        if not seen[0].isdisjoint(seen[1]):
            return True
    return False


def settings_that_differ(left: Record, right: Record) -> HeaderComparison:
    """Config, environment and model files that differ, without options that change no number.

    Nothing is said to differ that one side does not know.
    """
    one, other = left.header, right.header
    header = compare_headers(one, other)
    has_files = bool(one.model["files"] and other.model["files"])
    if one.config_is_ours and other.config_is_ours:
        # a path does not matter if its files are compared
        tokenizers = [side.tokenizer and side.tokenizer["files"] for side in (one, other)]
        same_tokenizer = tokenizers[0] == tokenizers[1]
        paths = [*TABLE["observing"], *(MODEL_PATHS[: 1 + same_tokenizer] if has_files else ())]
        config = [
            item
            for item in header.config
            if item.where.split(".")[0] not in WITHOUT_NUMBERS and item.where not in paths
        ]
    else:
        is_known = one.trainer == other.trainer and bool(one.config and other.config)
        config = [
            item for item in header.config if is_known and item.where.split(".")[-1] not in TABLE["of_places"]
        ]
    if one.trainer is None and other.trainer is None:
        return replace(header, config=tuple(config))
    imported = any("imported" in side.environment for side in (one, other))
    environment = () if imported else header.environment
    return HeaderComparison(
        config=tuple(config),
        environment=tuple(item for item in environment if not item.where.startswith("trainer")),
        model=header.model if has_files else (),
    )


def unknown_values(sides: Mapping[str, Counter[str]]) -> list[str]:
    """Return a phrase for both sides, and for each; its count under "" is that of all rows."""
    absent = [key for key in sides["A"] if key and all(one[key] == one[""] for one in sides.values())]
    found = [f"{', '.join(absent)} in both"] if absent else []
    for side, counts in sides.items():
        keys = [f"{key} of {count}" for key, count in counts.items() if key and key not in absent]
        found += [f"{', '.join(keys)} of {counts['']} rows in {side}"] if keys else []
    return found


def unknown_settings(left: RecordHeader, right: RecordHeader) -> list[str]:
    if left.trainer is None and right.trainer is None:
        return []
    sides = {"A": left, "B": right}
    found = [f"config in {side}" for side, header in sides.items() if not header.config]
    if not found and left.trainer != right.trainer and not (left.config_is_ours and right.config_is_ours):
        found = [f"config (A is of {left.trainer or 'AReaL'}, B of {right.trainer or 'AReaL'})"]
    found += [f"environment in {side}" for side, header in sides.items() if "imported" in header.environment]
    return found + [f"model files in {side}" for side, header in sides.items() if not header.model["files"]]


def stages_not_recorded(
    left: Record, right: Record, here: RecordedStep, there: RecordedStep
) -> tuple[str, ...]:
    if left.header.trainer or right.header.trainer:
        shared = stages_shared(here, there)
        return tuple(stage for stage in STAGES if stage not in shared)
    both = (left.header.recording, right.header.recording)
    if not all(recording.has_plans for recording in both):
        return STAGES[1:]
    return ("logprobs", "advantages") if "plan" in {recording.scope for recording in both} else ()


def acts_from(option: str) -> str:
    """Return the first stage on which an option acts."""
    prefixes = [
        (len(p), stage) for stage, names in TABLE["acts_from"].items() for p in names if option.startswith(p)
    ]
    return max(prefixes, default=(0, "batch"))[1]


def settle_stage(
    differences: tuple[StageDifference, ...], header: HeaderComparison
) -> tuple[StageDifference, ...]:
    """Change the first stage to "weights" if unrecorded weights explain a later loss.

    Without checksums of each minibatch (scope "full"), another loss in minibatch 1 can mean another
    loss function, or other weights after minibatch 0. If only options of the optimizer differ, it
    is the weights.
    """
    first = differences[0]
    if (
        first.stage != "loss"
        or not first.minibatch
        or any(d.stage == "weights" and d.minibatch is not None for d in differences)
    ):
        return differences
    stages = {acts_from(item.where) for item in header.config}
    return (replace(first, stage="weights"), *differences[1:]) if stages == {"weights"} else differences


def judge_own_code(left: Record, right: Record, first: StageDifference) -> Verdict | None:
    """Return the user's own code that differs and acts on the first difference, None without."""
    own = compare_own_code(left.header, right.header, is_replay=False)
    acting = [
        str(one)
        for one in own
        if one.changed and STAGES.index(FIRST_STAGE.get(one.role, "batch")) <= STAGES.index(first.stage)
    ]
    return Verdict("own code", "; ".join(acting)) if acting else None


def judge_difference(
    first: StageDifference,
    header: HeaderComparison,
    config: dict[str, Any],
    trainers: tuple[str | None, str | None] = (None, None),
) -> Verdict:
    """Determine why the records diverge at their first difference.

    `config` is empty if one of the records has none; `trainers` are None for ours.
    """
    # one that acts earlier would have changed earlier stages as well: the latest first
    able = [
        item for item in header.config if STAGES.index(acts_from(item.where)) <= STAGES.index(first.stage)
    ]
    if options := sorted(able, key=lambda item: -STAGES.index(acts_from(item.where))):
        names = ", ".join(item.where for item in options[:3])
        acts = f" and acts on the {first.stage}"
        if trainers[0] is not None:
            acts = f"; where an option of {trainers[0]} acts is not known"
        return Verdict("configuration", f"{names} was set differently{acts}", tuple(options))
    if header.model:
        return Verdict("input", "the runs started from other model files", header.model)
    same_trainer = trainers[0] == trainers[1]
    environment = tuple(item for item in header.environment if explains(item, first))
    if environment and same_trainer:
        names = ", ".join(item.where for item in environment[:3])
        settings = "settings are the same" if config else "settings are not known"
        return Verdict("environment", f"{settings}, but the environment is not: {names}", environment)
    in_prompt = first.place is not None and first.place.in_prompt and first.name != "loss_mask"
    if first.stage == "batch" and in_prompt:
        return Verdict("input", "the prompts differ: other data, or another order of it")
    if first.stage == "batch":
        return Verdict("input", ({first.name: f"{first.name} of the batch differs"} | INPUTS)[first.name])
    if not same_trainer:
        return Verdict(
            "unknown", "two trainers computed it: `areal-debug crosscheck` compares what they compute"
        )
    return judge_size(first, config)


def explains(item: Difference, first: StageDifference) -> bool:
    """Return whether a difference of the environment can be the cause.

    Rows, masks and rewards do not depend on the hardware.
    """
    if first.stage != "batch" or first.name in ("input_ids", "logprobs"):
        return True
    return item.where.split(".")[0] in ("code", "libraries", "python")


def judge_size(first: StageDifference, config: dict[str, Any]) -> Verdict:
    """Return "kernel noise" if precision explains the size of the difference, else "unknown"."""
    actor = config.get("actor")
    dtype = ({"dtype": "float32"} | actor)["dtype"] if isinstance(actor, dict) else None
    if dtype not in NOISE:
        return Verdict("unknown", "no recorded setting explains it, and the trainer's precision is not known")
    noise = "the same settings on the same batch produced different bits"
    if first.largest is None:
        return Verdict("kernel noise", noise)
    limit = NOISE[dtype] * max(1.0, abs(first.left) if isinstance(first.left, float) else 1.0)
    if first.largest <= limit:
        size = f"largest difference {first.largest:.3g}, {dtype} explains {limit:.3g}"
        return Verdict("kernel noise", f"{noise} ({size})")
    return Verdict(
        "unknown",
        f"no recorded setting differs, and {first.largest:.3g} is more than the noise of {dtype} "
        f"({limit:.3g}): not explained by config, model files, commit, libraries, variables and device",
    )


AROUND = 12  # tokens before one; half as many after it
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Excerpt:
    """Text around a token."""

    before: str
    token: str
    after: str


def read_excerpts(
    left: Record, right: Record, step: int, difference: StageDifference, load_decode: Callable[[], Decode]
) -> tuple[Excerpt, Excerpt] | None:
    """Return the text around the first difference in both, or None if it is not at a token of both.

    Values of stages after "batch" are next-token aligned: they belong to the token after their
    position.
    """
    place = difference.place
    if place is None or place.token is None or place.right is None:
        return None
    token, decode = place.token + (difference.stage != "batch"), load_decode()
    begin = max(0, token - AROUND)

    def excerpt(record: Record, row: tuple[int, int]) -> Excerpt:
        ids = record.step(step).rows(*row)["input_ids"].tolist()
        parts = ids[begin:token], ids[token : token + 1], ids[token + 1 : token + AROUND // 2]
        return Excerpt(*(decode(part) if part else "" for part in parts))

    return excerpt(left, (place.rank, place.row)), excerpt(right, place.right)

"""What can have made two records differ at a place, judged from the records alone.

    settings that differ ─> those that can act there ─┐
    code that differs    ─> files that act there     ─┼─> candidates, the nearest first ─> a finding
    rows that differ     ─> data, rewards, engine    ─┘

A candidate acts on the stage that differs or before it, and is on its own what is not the same in
both. `areal_debug.why.trials` runs steps again where several remain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from areal_debug.why.report import UNKNOWN, Cause, Confidence, Finding, Kind, Setting, listed
from recorder import Record
from recorder.difference import Difference
from recorder.environment import VARIABLES
from replayer.diff import DiffReport, acts_from, share_a_prompt
from replayer.request import is_new_option_at_default
from replayer.stages import STAGES, StageDifference, prompts_of

if TYPE_CHECKING:
    from replayer.commits.outside import CodeDifference
    from replayer.patterns import Pattern

# prefixes of options that a batch depends on, and nothing after it: its equal rows refute them
ONLY_BATCH = ("gconfig", "train_dataset", "valid_dataset", "rollout", "sglang", "vllm", "workflow")
# what differs in a batch -> the options that can act on it; {} any option
OF_DATA = ("seed", "train_dataset", "gconfig.n_samples", "rollout", "dynamic_bs", "total_train", "tokenizer_path",
           "actor.path", "allocation_mode")  # fmt: skip
OF_TOOLS = ("rollout", "workflow", "agent", "train_dataset")
OF_REWARDS = ("reward", "workflow", "agent", "train_dataset")
# members of the environment that `replayer.commits.outside` compares
OF_CODE = ("code", "libraries", "variables")
VARIABLES_OF_KERNELS = frozenset(VARIABLES) - {"PYTHONHASHSEED"}
# what differs in a batch -> words in the names of files and variables that compute it
WORDS = {
    "data": ("dataset", "loader", "rows", "prompt", "data", "batch"),
    "rewards": ("reward", "workflow", "agent"),
    "engine": ("embedded", "engine", "sglang", "vllm", "fleet", "generate", "live"),
    "tools": ("tool", "agent", "workflow"),
    "rows": ("episodes", "workflow", "agent", "batch"),
}
HARDWARE = ("cpu", "platform", "num_cores", "torch.gpus", "torch.gpu_driver")


@dataclass(frozen=True)
class Case:
    """Two records, and where they differ first.

    Attributes:
        outside: code and variables that differ, besides commits (`replayer.commits`).
        weights_before: whether the weights before the step are equal; None if it is not recorded.
        is_replay: the right record is a replay of the left one.
    """

    left: Record
    right: Record
    step: int
    first: StageDifference
    pattern: "Pattern | None"
    report: DiffReport
    outside: "tuple[CodeDifference, ...]"
    weights_before: bool | None
    is_replay: bool = False

    @property
    def kind_of_batch(self) -> str | None:
        """What of the batch differs: "data", "tools", "rewards", "rows", "engine"; else None."""
        if self.first.stage != "batch":
            return None
        place = self.first.place
        if self.first.name == "tool result":
            return "tools"
        if self.first.name in ("rows", "order of rows", "images") or (place is not None and place.in_prompt):
            return "data"
        if self.first.name in ("input_ids", "logprobs", "versions"):
            return "engine"
        return "rewards" if self.first.name == "rewards" else "rows"


@dataclass(frozen=True)
class Candidate:
    """A possible cause. `distance` is 0 for what acts directly where the records differ."""

    cause: Cause
    distance: int
    evidence: str
    refuted_by: str
    next: str
    settings: tuple[str, ...] = ()


def settings_of(case: Case) -> list[Setting]:
    """List everything that is not the same in both, what acts first."""
    header, first = case.report.set_differently, case.first
    found = [
        Setting("config", item.where, item.recorded, item.current, *option_acts(case, item))
        for item in header.config
    ]
    for item in header.model:
        found.append(Setting("model", item.where, item.recorded, item.current, True, "every stage reads it"))
    for item in header.environment:
        if item.where.split(".")[0] not in OF_CODE:
            acts = environment_acts(case, item)
            why = f"can act on the {first.stage}" if acts else "does not act on rows and masks"
            found.append(Setting("environment", item.where, item.recorded, item.current, acts, why))
    for outside in case.outside:
        section = "environment" if outside.kind in ("variable", "library") else "code"
        acts = outside_acts(case, outside)
        why = (
            f"can act on the {first.stage}"
            if acts
            else "what acts of a commit is listed as evidence"
            if outside.kind == "commit"
            else "does not act on rows"
        )
        found.append(Setting(section, outside.what, None, None, acts, why, is_outside=True))
    return sorted(found, key=lambda setting: not setting.acts)


def option_acts(case: Case, item: Difference) -> tuple[bool, str]:
    stage, option = case.first.stage, item.where
    if case.left.header.trainer is not None:
        return True, f"where an option of {case.left.header.trainer} acts is not known"
    for record, value in ((case.left, item.current), (case.right, item.recorded)):
        if is_new_option_at_default(option, value, record.header.config):
            return False, "is at its default, and unknown to the version of the other run"
    acts = acts_from(option)
    if STAGES.index(acts) > STAGES.index(stage):
        return False, f"acts later, from the {acts} on"
    if stage != "batch" and option.startswith(ONLY_BATCH):
        return False, "acts on the batch, which is equal"
    names = {"data": OF_DATA, "rewards": OF_REWARDS, "tools": OF_TOOLS}.get(case.kind_of_batch or "")
    if names is not None and not any(
        name in option if name == "reward" else option.startswith(name) for name in names
    ):
        return False, f"does not act on {case.kind_of_batch}"
    return True, f"acts on the {acts}" + (" and after" if acts != stage else "")


def environment_acts(case: Case, item: Difference) -> bool:
    if case.first.stage != "batch" or case.kind_of_batch == "engine":
        return True
    return item.where.split(".")[0] == "python"


def config_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Candidate]:
    """Yield one candidate for the options that act, the latest first."""
    acting = [item for item in settings if item.section == "config" and item.acts]
    if not acting:
        return
    stage = case.first.stage
    acting.sort(key=lambda item: -STAGES.index(acts_from(item.where)))
    nearest = acting[0]
    overrides = tuple(f"{item.where}={shown_value(item.right)}" for item in acting)
    what = f"{nearest.where} is {shown(nearest.left)} in A and {shown(nearest.right)} in B"
    if len(acting) > 1:
        what = f"{listed([item.where for item in acting])} were set differently ({what})"
    distance = STAGES.index(stage) - STAGES.index(acts_from(nearest.where))
    yield Candidate(
        Cause("config", what),
        distance,
        f"{listed([item.where for item in acting])} {'act' if len(acting) > 1 else 'acts'} on the {stage}",
        f"B, run again with {nearest.where}={shown_value(nearest.left)}, still differs from A there",
        next_of_config(case, overrides[0]),
        overrides,
    )


def next_of_config(case: Case, override: str) -> str:
    if case.first.stage == "batch" or not case.left.header.recording.has_plans:
        return diff_command(case)
    return replay_command(case.left, case.step, override)


def diff_command(case: Case) -> str:
    return f"areal-debug diff {quote(case.left.path)} {quote(case.right.path)} --step {case.step} --all"


def replay_command(record: Record, step: int, override: str = "") -> str:
    command = f"areal-debug replay {quote(record.path)} --from-step {step} --to-step {step}"
    return f"{command} {quote(override)}" if override else command


def model_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Candidate]:
    """Yield the model's files, if the records start from others."""
    names = [
        item.where.split(".size_bytes")[0].split(".crc32c")[0] for item in settings if item.section == "model"
    ]
    names = list(dict.fromkeys(names))
    if names and (case.step == case.left.steps[0] or not case.weights_before):
        of_weights = any(name.endswith((".safetensors", ".bin", ".gguf")) for name in names)
        what = f"A and B started from other model files ({listed(names)})"
        yield Candidate(
            Cause("config" if of_weights else "data", what),
            0,
            f"{listed(names)} of the model have other contents",
            "B, run again from A's model files, still differs from A there",
            f"areal-debug record show {quote(case.right.path)}",
        )


def environment_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Candidate]:
    """Yield one candidate of the switches that differ, then one of the hardware."""
    acting = [
        item for item in settings if item.section == "environment" and item.acts and not item.is_outside
    ]
    is_hardware = [item.where.startswith(HARDWARE) for item in acting]
    for hardware in (False, True):
        items = [item for item, is_one in zip(acting, is_hardware, strict=True) if is_one is hardware]
        if not items:
            continue
        one = items[0]
        what = f"{one.where} is {shown(one.left)} in A and {shown(one.right)} in B"
        if len(items) > 1:
            what += f" (also {listed([item.where for item in items[1:]])})"
        yield Candidate(
            Cause("environment", what),
            4 if hardware else 3,
            f"{listed([item.where for item in items])} can act on the {case.first.stage}",
            f"B, run again where {one.where} is {shown(one.left)}, still differs from A there",
            replay_command(case.right, case.step),
        )


def outside_candidates(case: Case) -> Iterator[Candidate]:
    """Yield what no commit shows: uncommitted changes, scripts, patched libraries, variables."""
    for item in case.outside:
        if not outside_acts(case, item):
            continue
        kind: Kind = "environment" if item.kind in ("variable", "library") else "code"
        if item.kind in ("variable", "library"):
            what = item.what
        elif item.used_by == "both":
            what = f"{item.what} is not the same in A and B"
        else:
            what = f"only {item.used_by} uses {item.file}"
        yield Candidate(
            Cause(kind, what, item.file, item.line),
            distance_of(case, item),
            f"{item.what} can act on the {case.first.stage}",
            f"B, run again with A's {item.kind}, still differs from A there",
            diff_command(case),
        )


def outside_acts(case: Case, item: "CodeDifference") -> bool:
    """Return whether code or a variable can act: what only rounds acts on no rows or rewards."""
    if item.kind == "commit":
        return item.file is not None  # a commit is judged by its own changes
    is_rounding = item.kind == "variable" and item.what.split()[0] in VARIABLES_OF_KERNELS
    return not (is_rounding and case.kind_of_batch in ("data", "tools", "rewards", "rows"))


def distance_of(case: Case, item: "CodeDifference") -> int:
    """Return how near code or a variable is: 0 if its name has a word of what differs.

    A file that one run alone uses comes last: a launcher is such a file, and a script that begins
    to use a module differs itself.
    """
    if item.used_by != "both":
        return 3
    words = WORDS.get(case.kind_of_batch or "", ())
    if any(word in f"{item.file or ''} {item.what}".lower() for word in words):
        return 0
    return 1 if item.kind != "script" or case.first.stage == "batch" else 2


def data_finding(case: Case) -> Finding | None:
    """Judge inputs or rewards that differ though nothing was set differently."""
    show = diff_command(case)
    first = case.first
    if first.name == "images":
        what = f"{first.num_different} of {first.num_compared} pictures of the same rows are others"
        evidence = f"A has {first.left or 'none'}, B {first.right or 'none'}"
        refuted = "the data sets of A and B have equal pictures"
        return Finding(Cause("data", what), "medium", (evidence,), refuted, show)
    if first.name == "tool result":
        what = "a tool outside of the run, or its data, answered the same call in another way"
        evidence = "the messages and the tool calls before it are equal"
        refuted = "the tool, called again with these arguments, returns the same every time"
        return Finding(Cause("environment", what), "medium", (evidence,), refuted, show)
    if case.kind_of_batch == "data":
        here, there = prompts_of(case.left.step(case.step), case.right.step(case.step))
        equal = sum(there.get(name) == prompt for name, prompt in here.items())
        if 2 * equal > len(here):
            what = f"{len(here) - equal} of {len(here)} rows have prompts of other content"
            evidence = (
                "the other prompts are equal, at the same place: the data set was changed, not its order"
            )
            return Finding(
                Cause("data", what),
                "medium",
                (evidence,),
                "the data sets of A and B have equal prompts",
                show,
            )
        if share_a_prompt(case.left, case.right, shared_steps(case)):
            what = (
                "the order of the prompts is not determined by what is recorded: something draws it at random"
            )
            evidence = "B has prompts of A at other places, with the same seed, data set options and code"
            refuted = "a third run has the order of A or of B"
            return Finding(Cause("nondeterminism", what), "medium", (evidence,), refuted, show)
        what = "B trains on other prompts, with the same options"
        return Finding(
            Cause("data", what),
            "medium",
            ("no prompt of A's steps is in B's",),
            "the data sets of A and B are equal",
            show,
        )
    if case.first.name == "rewards":
        what = "the rewards of the same completions are others in each run, with the same code: something draws them at random"
        refuted = "the reward function, called again with these completions, returns A's rewards every time"
        return Finding(
            Cause("nondeterminism", what), "medium", ("prompts and completions are equal",), refuted, show
        )
    return None


def shared_steps(case: Case) -> list[int]:
    return sorted(set(case.left.steps) & set(case.right.steps))


def shown(value: Any) -> str:
    """Format a value of a setting; None is "not set"."""
    return "not set" if value is None else str(value)


def shown_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def finding_of(candidate: Candidate, confidence: Confidence, *evidence: str) -> Finding:
    """Return a candidate as the answer."""
    return Finding(
        candidate.cause, confidence, (candidate.evidence, *evidence), candidate.refuted_by, candidate.next
    )


def unknown_finding(case: Case, *evidence: str) -> Finding:
    """Return that nothing explains the difference."""
    stage = {"batch": "batch", "logprobs": "advantages"}.get(case.first.stage, case.first.stage)
    stage = {"gradient": "backward", "weights": "optimizer"}.get(stage, stage)
    return Finding(
        UNKNOWN,
        "low",
        evidence,
        "any setting, file or variable that is not the same in A and B",
        f"areal-debug goto {quote(case.left.path)} --step {case.step} --at {stage} --shell",
    )

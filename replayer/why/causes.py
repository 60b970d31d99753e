"""What can have made two records differ at a place, judged from the records alone.

    settings that differ ─> those that can act there ─┐
    code that differs    ─> files that act there     ─┼─> candidates, the nearest first ─> a finding
    rows that differ     ─> data, rewards, engine    ─┘

A candidate acts on the stage that differs or before it, and is on its own what is not the same in
both. `areal_debug.replay.ranks` runs steps again where several remain.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from areal_core.config.presets import shown as spelled
from areal_core.config.train_engine import OWN_CODE
from recorder import Record
from recorder.difference import Difference
from recorder.environment import VARIABLES
from replayer.check import member
from replayer.commits.acting import ChangedFile, files_acting
from replayer.commits.bisect import Commit, commits_between, git, has_commit
from replayer.commits.outside import code_of
from replayer.commits.warm import search_commits
from replayer.compare.relations import count, listed
from replayer.compare.stages import STAGES, StageDifference, prompts_of
from replayer.diff import SEARCHED_FOR_PROMPTS, DiffReport, acts_from, common_steps, share_a_prompt
from replayer.errors import SameNumbers
from replayer.own_code import code_arguments, own_code_of
from replayer.request import Request, is_new_option_at_default
from replayer.step_weights import WEIGHTS
from replayer.why.report import UNKNOWN, Cause, Confidence, Finding, Kind, Setting

if TYPE_CHECKING:
    from replayer.commits.outside import CodeDifference
    from replayer.compare.relations import Pattern

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEAST_ALIGNED = 0.75  # of the prompts have the same order, if rows were removed, added or moved
# members of the environment that `replayer.commits.outside` compares
OF_CODE = ("code", "libraries", "variables")
VARIABLES_OF_KERNELS = frozenset(VARIABLES) - {"PYTHONHASHSEED"}
# Last parts of names of options of other trainers.
NO_NUMBER = re.compile(
    r"(?i)log(ging)?_?(dir|steps|freq|level)?|output_?dir|save_\w+|run_?name|report_to|wandb\w*|project(_name)?|"
    r"(experiment|trial)(_name)?|(dataloader_)?num_workers|hub_\w+|push_to_hub"
)
OF_OPTIMIZER = re.compile(
    r"(?i)lr|learning_rate|weight_decay|adam_\w+|betas|beta_?\d|max_grad_norm|(grad|clip)_(clip|grad)\w*|warmup\w*|lr_\w+|optim\w*"
)


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

    @cached_property
    def kind_of_batch(self) -> str | None:
        """What of the batch differs: "data", "tools", "rewards", "rows", "engine"; else None."""
        if self.first.stage != "batch":
            return None
        place = self.first.place
        if self.first.name == "loss_mask":  # a token before the first in A's mask may be none of the prompt
            return "rows"
        if self.first.name == "tool result":
            return "tools"
        if self.first.name in ("rows", "order of rows", "images") or (place is not None and place.in_prompt):
            return "data"
        if self.first.name in ("input_ids", "logprobs", "versions"):
            return "data" if self.left.step(self.step).is_given else "engine"
        return "rewards" if self.first.name == "rewards" else "rows"


def settings_of(case: Case) -> list[Setting]:
    """List everything that is not the same in both, what acts first."""
    header, first = case.report.set_differently, case.first
    found = [
        Setting("config", item.where, item.recorded, item.current, *option_acts(case, item))
        for item in header.config
    ]
    for item in header.model:
        reads = "every stage reads it"
        if case.kind_of_batch == "data" and file_of(item.where).endswith(WEIGHTS):
            reads = "acts on which prompts are in the batch only where answers choose them"
        found.append(Setting("model", item.where, item.recorded, item.current, True, reads))
    for item in header.environment:
        if item.where.split(".")[0] not in OF_CODE:
            acts = first.stage != "batch" or case.kind_of_batch == "engine" or item.where == "python"
            why = f"can act on the {first.stage}" if acts else "does not act on rows and masks"
            found.append(Setting("environment", item.where, item.recorded, item.current, acts, why))
    for outside in case.outside:
        section = "environment" if outside.kind in ("variable", "library") else "code"
        acts = outside_acts(case, outside)
        without = TABLE["without_effect"][outside.kind].format(acts_from=outside.acts_from)
        why = f"can act on the {first.stage}" if acts else without
        found.append(Setting(section, outside.what, None, None, acts, why, is_outside=True))
    return sorted(found, key=lambda setting: not setting.acts)


def option_acts(case: Case, item: Difference) -> tuple[bool, str]:
    stage, option = case.first.stage, item.where
    if case.left.header.trainer is not None:
        name = option.rpartition(".")[2]
        if NO_NUMBER.fullmatch(name):
            return False, "names files or services, and acts on no number"
        if case.step == case.left.steps[0] and stage != "weights" and OF_OPTIMIZER.fullmatch(name):
            return False, "acts later, from the weights on"
        return True, f"where this option of {case.left.header.trainer} acts is not known"
    for record, value in ((case.left, item.current), (case.right, item.recorded)):
        if is_new_option_at_default(option, value, record.header.config):
            return False, "is at its default, and unknown to the version of the other run"
    acts = acts_from(option)
    if STAGES.index(acts) > STAGES.index(stage):
        return False, f"acts later, from the {acts} on"
    if stage != "batch" and option.startswith(tuple(TABLE["only_batch"])):
        return False, "acts on the batch, which is equal"
    names = TABLE["options"].get(case.kind_of_batch)
    if names is not None and not option.startswith(tuple(names)):
        return False, f"does not act on {case.kind_of_batch}"
    return True, f"acts on the {acts}" + (" and after" if acts != stage else "")


def config_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Finding]:
    """Yield one candidate for the options that act, the latest first."""
    acting = [item for item in settings if item.section == "config" and item.acts]
    if not acting:
        return
    stage, has_plans = case.first.stage, case.left.header.recording.has_plans
    acting.sort(key=lambda item: -STAGES.index(acts_from(item.where)))
    nearest = acting[0]
    overrides = tuple(f"{item.where}={spelled(item.right)}" for item in acting)
    is_own_code = any(item.where.removeprefix("actor.") in OWN_CODE for item in acting)
    names = listed([item.where for item in acting])
    what = f"{nearest.where} is {shown(nearest.left)} in A and {shown(nearest.right)} in B"
    if len(acting) > 1:
        what = f"{names} were set differently ({what})"
    distance = STAGES.index(stage) - STAGES.index(acts_from(nearest.where))
    evidence = f"{names} {'act' if len(acting) > 1 else 'acts'} on the {stage}"
    yield Finding(
        Cause("config", what),
        "low",
        (evidence if case.left.header.trainer is None else nearest.why,),
        f"B, run again with {nearest.where}={spelled(nearest.left)}, still differs from A there",
        diff_command(case)
        if stage == "batch" or not has_plans or is_own_code
        else replay_command(case.left, case.step, overrides[0]),
        distance=distance,
        settings=() if is_own_code else overrides,  # no record decides that code runs
    )


def diff_command(case: Case) -> str:
    if case.is_replay:  # its record is removed at the end
        return replay_command(case.left, case.step)
    return f"areal-debug why {quote(case.left.path)} {quote(case.right.path)} --all --step {case.step}"


def replay_command(record: Record, step: int, override: str = "") -> str:
    command = (
        f"areal-debug replay {quote(record.path)} --from-step {step} --to-step {step}{code_of_user(record)}"
    )
    return f"{command} {quote(override)}" if override else command


def code_of_user(record: Record) -> str:
    files = [own.file for own in own_code_of(record.header).values()]
    return "".join(f" {quote(word)}" for word in code_arguments(files))


def model_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Finding]:
    """Yield the model's files, if the records start from others."""
    names = list(dict.fromkeys(file_of(item.where) for item in settings if item.section == "model"))
    if names and (case.step == case.left.steps[0] or not case.weights_before):
        is_weights = any(name.endswith(WEIGHTS) for name in names)
        key = "model_weights" if is_weights else "model_files"
        found = finding(key, f"areal-debug record show {quote(case.right.path)}", names=listed(names))
        yield replace(found, distance=1 if is_weights and case.kind_of_batch == "data" else 0)


def file_of(where: str) -> str:
    """Return the model's file that a difference names."""
    return where.split(".size_bytes")[0].split(".crc32c")[0]


def environment_candidates(case: Case, settings: Sequence[Setting]) -> Iterator[Finding]:
    """Yield one candidate of the switches that differ, then one of the hardware."""
    acting = [
        item for item in settings if item.section == "environment" and item.acts and not item.is_outside
    ]
    is_hardware = [item.where.startswith(tuple(TABLE["hardware"])) for item in acting]
    for hardware in (False, True):
        items = [item for item, is_one in zip(acting, is_hardware, strict=True) if is_one is hardware]
        if not items:
            continue
        one, names = items[0], [item.where for item in items]
        found = finding(
            "machine",
            replay_command(case.right, case.step),
            one=one.where,
            left=shown(one.left),
            right=shown(one.right),
            also=f" (also {listed(names[1:])})" if len(items) > 1 else "",
            names=listed(names),
            stage=case.first.stage,
        )
        yield replace(found, distance=4 if hardware else 3)


def outside_candidates(case: Case) -> Iterator[Finding]:
    """Yield what no commit shows: uncommitted changes, scripts, patched libraries, variables."""
    for item in case.outside:
        if not outside_acts(case, item):
            continue
        is_data = item.file is not None and item.file.endswith(tuple(TABLE["data_files"]))
        kind: Kind = "environment" if item.kind in ("variable", "library") else "data" if is_data else "code"
        if item.kind in ("variable", "library", "commit"):
            what = item.what
        elif item.used_by == "both":
            what = f"{item.what} differs between A and B"
        else:
            what = f"only {item.used_by} uses {item.file}"
        yield Finding(
            Cause(kind, what, item.file, item.line),
            "low",
            (f"can act on the {case.first.stage}: {item.what}",),
            f"B, run again with A's {item.kind}, still differs from A there",
            diff_command(case),
            distance=distance_of(case, item),
        )


def outside_acts(case: Case, item: "CodeDifference") -> bool:
    """Return whether code or a variable can act: what only rounds acts on no rows or rewards."""
    if item.kind == "commit":
        # a commit is judged by its own changes
        return item.file is not None and not item.file.endswith(tuple(TABLE["prose_files"]))
    if item.kind == "own code":
        return STAGES.index(item.acts_from) <= STAGES.index(case.first.stage)
    is_rounding = item.kind == "variable" and item.what.split()[0] in VARIABLES_OF_KERNELS
    return not (is_rounding and case.kind_of_batch in ("data", "tools", "rewards", "rows"))


def distance_of(case: Case, item: "CodeDifference") -> int:
    """Return how near code or a variable is: 0 if its name has a word of what differs.

    The user's own code is nearest: it computes nothing but its stages.
    A file that one run alone uses comes last: a launcher is such a file, and a script that begins
    to use a module differs itself.
    """
    if item.kind == "own code":
        return -1
    if item.used_by != "both":
        return 3
    words = TABLE["words"].get(case.kind_of_batch, ())
    if any(word in f"{item.file or ''} {item.what}".lower() for word in words):
        return 0
    return 1 if item.kind != "script" or case.first.stage == "batch" else 2


def finding(key: str, command: str, *evidence: str, **fields: Any) -> Finding:
    """Fill in a row of findings of the table, with further evidence."""
    row = TABLE["findings"][key]
    said = (row["evidence"].format(**fields),) if "evidence" in row else ()
    cause = Cause(row["kind"], row["what"].format(**fields))
    refuted = row["refuted_by"].format(**fields)
    return Finding(cause, row["confidence"], (*said, *evidence), refuted, command)


def data_finding(case: Case) -> Finding | None:
    """Judge inputs or rewards that differ though nothing was set differently."""
    first, command = case.first, diff_command(case)
    counts = {"differing": first.num_different, "total": first.num_compared}
    if first.name == "images":
        return finding("pictures", command, left=first.left or "none", right=first.right or "none", **counts)
    if first.name in ("tool result", "loss_mask"):
        return finding("tool" if first.name == "tool result" else "mask", command, **counts)
    if case.kind_of_batch == "data":
        if first.name == "input_ids" and first.place is not None and not first.place.in_prompt:
            here, there = prompts_of(case.left.step(case.step), case.right.step(case.step), part=0)
            other = [name for name in here if there.get(name) != here[name]]
            exchanged = all(
                there.get((prompt, 1 - sample)) == here[prompt, sample] for prompt, sample in other
            )
            key = "exchanged" if exchanged else "answers"
            return finding(key, command, differing=len(other), total=len(here))
        if aligned := aligned_finding(case, command):
            return aligned
        here, there = prompts_of(case.left.step(case.step), case.right.step(case.step))
        equal = sum(there.get(name) == prompt for name, prompt in here.items())
        if len(here) > equal > len(here) / 2 and Counter(here.values()) != Counter(there.values()):
            return finding("some_prompts", command, differing=len(here) - equal, total=len(here))
        is_shared = share_a_prompt(case.left, case.right, common_steps(case.left, case.right))
        return order_finding(case, command) if is_shared else finding("prompts", command)
    if first.name == "rewards":
        names = " and ".join(
            name
            for name, record in (("A", case.left), ("B", case.right))
            if not (code := code_of(record.header)).get("reward_fn") and code.get("commit") is None
        )
        if names:
            unnamed = f"the code of {names} is not recorded, so it may be an edit or chance"
            return finding("rewards_by_unknown_code", command, unnamed)
        return finding("rewards", command)
    return None


def aligned_finding(case: Case, command: str) -> Finding | None:
    """Find rows that are missing, added or moved in B's data set; None for another order or other prompts.

    The prompts are aligned in the order in which they were read, over the common steps. What the
    last step of a record cuts off is no difference, and the order within a step is none of the data.
    """
    is_ours = case.left.header.trainer is None
    if is_ours and case.first.name == "rows":  # left out by the run: they have the numbers of their rows
        return None
    read: tuple[list[Hashable], list[Hashable]] = ([], [])
    has_moved = False
    for step in common_steps(case.left, case.right)[:SEARCHED_FOR_PROMPTS]:
        both = prompts_of(case.left.step(step), case.right.step(step))
        has_moved |= set(both[0].values()) != set(both[1].values())
        for side, prompts in zip(read, both, strict=True):
            names = sorted(prompts) if is_ours else list(prompts)
            side += {prompt: prompts[prompt, sample] for prompt, sample in names}.values()
    codes = SequenceMatcher(None, *read, autojunk=False).get_opcodes()
    equal = sum(end - begin for kind, begin, end, _, _ in codes if kind == "equal")
    inner = [code for code in codes[: -1 if codes[-1][0] != "equal" else None] if code[0] != "equal"]
    lacking = Counter(prompt for _, begin, end, _, _ in inner for prompt in read[0][begin:end])
    added = Counter(prompt for _, _, _, begin, end in inner for prompt in read[1][begin:end])
    is_aligned = has_moved and inner and equal >= LEAST_ALIGNED * min(map(len, read))
    if not is_aligned or (lacking and added and lacking != added):
        return None
    key = "moved" if lacking == added else "removed" if lacking else "added"
    return finding(key, command, prompts=count(max(lacking.total(), added.total()), "prompt"), equal=equal)


def order_finding(case: Case, command: str) -> Finding:
    """Judge another order of the prompts: of the data set, if no run shuffles or its size differs."""
    sizes = [record.header.environment.get("num_rows") for record in (case.left, case.right)]
    if None not in sizes and sizes[0] != sizes[1]:
        return finding("num_rows", command, left=sizes[0], right=sizes[1])
    in_order = all(
        False in (member(record.header.config, name) for name in ("train_dataset.shuffle", "shuffle_dataset"))
        for record in (case.left, case.right)
    )
    return finding("order_of_data" if in_order else "order", command)


def shown(value: Any) -> str:
    """Format a value of a setting; None is "not set"."""
    return "not set" if value is None else str(value)


def unknown_finding(case: Case, *evidence: str) -> Finding:
    """Return that nothing explains the difference."""
    stage = {"batch": "batch", "logprobs": "advantages"}.get(case.first.stage, case.first.stage)
    stage = {"gradient": "backward", "weights": "optimizer"}.get(stage, stage)
    command = f"areal-debug goto {quote(case.left.path)} --step {case.step} --at {stage} --shell{code_of_user(case.left)}"
    if case.left.header.trainer is not None:  # whose steps cannot be replayed
        command = diff_command(case)
    return Finding(
        UNKNOWN, "low", evidence, "any setting, file or variable that is not the same in A and B", command
    )


Note = Callable[[str], None]


@dataclass(frozen=True)
class Acting:
    """A commit that changes what a stage runs, and the file of it that is nearest."""

    commit: Commit
    file: ChangedFile


@dataclass(frozen=True)
class History:
    """The commits between two records: `older` to `newer`, and those that act, oldest first.

    `is_reversed`: A has the newer one. `num_commits` is how many there are.
    """

    repository: Path
    older: str
    newer: str
    is_reversed: bool
    num_commits: int
    acting: tuple[Acting, ...]


def commits_of(case: Case) -> tuple[str | None, str | None]:
    one, other = (code_of(record.header).get("commit") for record in (case.left, case.right))
    return one, other


def read_history(
    case: Case, repository: Path, commits: tuple[str | None, str | None]
) -> History | str | None:
    """Return the commits between the records, None if they are the same, or why it is not known."""
    one, other = commits
    if one is None or other is None or one == other:
        return None
    missing = [commit[:10] for commit in (one, other) if not has_commit(repository, commit)]
    if missing:
        return f"commit {' and '.join(missing)} is not in {repository}: give the checkout with --repository"
    base = git(repository, "merge-base", one, other).strip()
    if base not in (one, other):
        return f"commits {one[:10]} and {other[:10]} are on different branches: bisect from {base[:10]}"
    older, newer = (one, other) if base == one else (other, one)
    between = commits_between(repository, older, newer)
    acting = []
    if paths := [file.path for file in acting_on(case, repository, older, newer)]:
        touched = git(repository, "rev-list", "--first-parent", f"{older}..{newer}", "--", *paths).split()
        for commit in [commit for commit in between if commit.hash in touched]:
            if files := acting_on(case, repository, f"{commit.hash}^", commit.hash):
                acting.append(Acting(commit, files[0]))
    return History(repository, older, newer, older == other, len(between), tuple(acting))


def acting_on(case: Case, repository: Path, older: str, newer: str) -> list[ChangedFile]:
    """List the changed files that act where the records differ, the nearest first.

    What an earlier stage computed is not known if that stage was not recorded.
    """
    stage = case.first.stage
    stages = [
        stage,
        *(earlier for earlier in STAGES[: STAGES.index(stage)] if earlier in case.report.not_compared),
    ]
    if case.first.name == "loss_mask":  # it is aligned where the advantages are computed
        stages.append("advantages")
    files = {
        file.path: file for one in reversed(stages) for file in files_acting(repository, older, newer, one)
    }
    return sorted(files.values(), key=lambda file: nearness(case, file))


def nearness(case: Case, file: ChangedFile) -> tuple[bool, int]:
    """Return the sort key of a file: whether its path does not name what differs, its distance."""
    words = TABLE["words"].get(case.kind_of_batch, ())
    return bool(words) and not any(word in file.path for word in words), file.distance


def bisected(case: Case, history: History, model: str | None, note: Note) -> Finding | None:
    """Replay A by the commits that act, or all, and return the one that changed its numbers.

    None if all of them produce the same numbers: then the code is not the cause.

    Raises NothingToBisect if a commit cannot replay A.
    """
    good, bad = history.older, history.newer
    if history.acting:
        good, bad = f"{history.acting[0].commit.hash}^", history.acting[-1].commit.hash
    request = Request(case.left.path, case.step, case.step, model and str(Path(model).resolve()))
    try:
        report = search_commits(request, history.repository, good, bad, case.left.header.world_size, note)
    except SameNumbers:
        return None
    culprit = report.culprits[-1]
    of_culprit = [item for item in history.acting if item.commit.hash == culprit.hash]
    place = of_culprit[0].file if of_culprit else None
    found = commit_finding(case, history, culprit, place, "high" if len(report.culprits) == 1 else "medium")
    return found.with_evidence(
        "steps of A, replayed by the commits, change with this one, first in "
        f"step {report.step} ({report.num_replays} replays)"
    )


def commit_finding(
    case: Case, history: History, commit: Commit, place: ChangedFile | None, confidence: Confidence
) -> Finding:
    file, line = (None, None) if place is None else (place.path, place.first_line)
    where = "" if file is None else f" changed {file}:{line}"
    side = "A" if history.is_reversed else "B"
    what = f'commit {commit.hash[:10]} "{commit.subject}"{where}, and only {side} has it'
    evidence = f"of {count(history.num_commits, 'commit')} between A and B, {len(history.acting)} changed what the {case.first.stage} runs"
    path = "" if file is None else f" -- {quote(file)}"
    return Finding(
        Cause("code", what, file, line, commit.hash),
        confidence,
        (evidence,),
        "B, run again without this commit, still differs from A there",
        f"git -C {quote(str(history.repository))} show {commit.hash[:10]}{path}",
    )


def static_finding(case: Case, history: History) -> Finding:
    """Return the commit that acts nearest, of what no replay can show, as a batch."""
    best = min(reversed(history.acting), key=lambda item: nearness(case, item.file))
    rivals = [item for item in history.acting if nearness(case, item.file) == nearness(case, best.file)]
    only = len(rivals) == 1
    found = commit_finding(case, history, best.commit, best.file, "medium" if only else "low")
    if len(history.acting) == 1:
        return replace(found, confidence="high")
    others = listed(
        [f"{item.commit.hash[:10]} ({item.file.path})" for item in history.acting if item is not best]
    )
    return found.with_evidence(f"further commits that could act: {others}")

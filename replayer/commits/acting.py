"""Which files, changed between two commits, act on a stage of a step, and where.

A file acts if one of its changed definitions is used by the stage's computation
(`replayer.commits.references`). Changed comments, docstrings and layout act on nothing.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from replayer.commits.references import Definition, SourceFile, Sources, is_docstring, sources
from replayer.commits.repository import git

CORE = "areal_core"
OBJECTIVE = f"{CORE}/trainer/objective.py:PolicyObjective"
ENGINE = f"{CORE}/engine/fsdp.py:FSDPEngine"
MODEL = tuple(
    f"{CORE}/engine/{name}.py"
    for name in ("attention", "logits", "logprobs", "lora", "model", "scores", "sequence_parallel",
                 "sharding", "tensor_parallel", "vision")
)  # fmt: skip
LOSS = (
    f"{OBJECTIVE}.loss",
    f"{OBJECTIVE}.denominator",
    f"{CORE}/trainer/update.py",
    f"{CORE}/algorithm/losses.py",
    f"{CORE}/algorithm/off_policy.py",
    f"{ENGINE}.train_batch",
    *MODEL,
)
# stage -> where its computation starts; tests/replayer/test_commits.py holds it against a real step
ENTRIES: dict[str, tuple[str, ...]] = {
    "batch": (
        *(f"{CORE}/rollout/{n}.py" for n in ("pipeline", "episodes", "staleness", "workflow")),
        f"{CORE}/trainer/live.py",
        *(f"{CORE}/data/{n}.py" for n in ("loader", "read", "rows")),
        *(f"{CORE}/reward/{n}.py" for n in ("functions", "reward_pool", "reward_worker", "signature")),
        *(f"{CORE}/embedded/{n}.py" for n in ("engine", "generate", "replica")),
        *(
            f"{CORE}/servers/{n}.py"
            for n in ("client", "reply", "sglang", "update_group", "vllm", "weight_update")
        ),
        f"{CORE}/launch/vllm_worker/areal_vllm_worker.py",
        f"{CORE}/agent/agent_workflow.py",
        f"{CORE}/trainer/build_rollouts.py",
        f"{CORE}/engine/full_weights.py",
    ),
    "logprobs": (
        f"{CORE}/algorithm/alignment.py:to_next_token",
        f"{OBJECTIVE}.learning_inputs",
        f"{OBJECTIVE}._scored",
        f"{ENGINE}.score",
        f"{ENGINE}.compute_logprobs",
        f"{ENGINE}.compute_values",
        f"{CORE}/trainer/update.py:critic_values",
        f"{CORE}/trainer/build_models.py",
        f"{CORE}/trainer/build.py:build_engine",
        f"{CORE}/engine/determinism.py",
        *MODEL,
    ),
    "advantages": (
        f"{OBJECTIVE}.learning_inputs",
        f"{CORE}/algorithm/advantages.py",
        f"{CORE}/algorithm/alignment.py",
        f"{CORE}/algorithm/normalization.py",
    ),
    "loss": LOSS,
    "gradient": (
        *LOSS,  # an equal loss may have another gradient
        f"{ENGINE}.backward",
        f"{CORE}/engine/optimizer.py:gradient_norm",
    ),
    "weights": (
        f"{CORE}/engine/optimizer.py",
        f"{CORE}/engine/offload.py",
        f"{ENGINE}.train_batch",
        f"{ENGINE}.step_schedule",
        f"{CORE}/engine/checkpoint/distributed.py",
        f"{CORE}/trainer/build.py:build_engine",
    ),
}
# for every stage; their own references lead to all others
OF_EVERY_STAGE = (f"{CORE}/trainer/rl.py:train_steps", f"{CORE}/data/batch.py")
# of a stage, but what they refer to is mostly of another one
NOT_FOLLOWED = {"logprobs": (f"{OBJECTIVE}.learning_inputs",), "advantages": (f"{OBJECTIVE}._scored",)}
HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class ChangedFile:
    """A file that changed between two commits and acts on a stage.

    Attributes:
        first_line: the first changed line of code, in the later commit, of the definition that is
            nearest to the stage.
        added, removed: lines of the file, as counted by git.
        distance: references from the stage to that definition.
    """

    path: str
    first_line: int
    added: int
    removed: int
    distance: int


def files_acting(
    repository: Path, good: str, bad: str, stage: str, scripts: Sequence[str] = ()
) -> tuple[ChangedFile, ...]:
    """List the files changed from `good` to `bad` that act on a stage, the nearest first.

    Args:
        stage: one of `replayer.compare.stages.STAGES`.
        scripts: paths in the repository of the user's scripts, which are searched in place of our
            trainer; a repository without our trainer needs them.

    Raises NothingToBisect for a revision that does not exist.
    """
    counts = list(changed_python_files(repository, good, bad))
    if not counts:
        return ()
    with (
        sources(repository, good) as before,
        sources(repository, bad, folders_of(scripts)) as after,
    ):
        entries = [*scripts] or [*ENTRIES[stage], *OF_EVERY_STAGE]
        stops = () if scripts else (*OF_EVERY_STAGE, *NOT_FOLLOWED.get(stage, ()))
        reached = after.distances(entries, stops)
        found = []
        for path, added, removed in counts:
            changed = changed_definitions(before.file(path), after.file(path))
            near = [(reached[path, name], name) for name in changed if (path, name) in reached]
            if near:
                distance, name = min(near)
                line = first_changed_line(repository, good, bad, after, (path, name))
                found.append(ChangedFile(path, line, added, removed, distance))
    return tuple(sorted(found, key=lambda file: (file.distance, file.path)))


def folders_of(scripts: Sequence[str]) -> list[str]:
    return [f"{folder}/" for script in scripts if str(folder := PurePosixPath(script).parent) != "."]


def changed_python_files(repository: Path, good: str, bad: str) -> Iterator[tuple[str, int, int]]:
    for line in git(repository, "diff", "--numstat", "--no-renames", "-z", good, bad, "--").split("\0"):
        if line:
            added, removed, path = line.split("\t", 2)
            if path.endswith(".py"):
                yield path, int(added), int(removed)


def changed_definitions(before: SourceFile, after: SourceFile) -> set[str]:
    """Return the names of definitions that compute something else in the later file.

    Of a definition that was removed it is the rest of the module, "".
    """
    old, new = before.content, after.content
    changed = {name for name, content in new.items() if name not in old or old[name] != content}
    return changed | ({""} if old.keys() - new.keys() and new else set())


def first_changed_line(repository: Path, good: str, bad: str, after: Sources, definition: Definition) -> int:
    path, name = definition
    nodes = after.file(path).definitions[name]
    # decorators precede the line of a definition
    spans = [
        (min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]), node.end_lineno or 0)
        for node in nodes
    ]
    text = git(repository, "diff", "-U0", "--no-renames", good, bad, "--", path)
    lines = after.read(path).splitlines()
    prose = docstring_lines(nodes)
    changed: list[int] = []
    for match in HUNK.finditer(text):
        begin, count = int(match[1]), int(match[2] or 1)
        changed += range(begin, begin + count) if count else [begin]  # removed lines were after `begin`
    inside = [n for n in changed if any(first <= n <= last for first, last in spans)]
    code = [n for n in inside if n not in prose and lines[n - 1].strip() and lines[n - 1].strip()[0] != "#"]
    return next(iter([*code, *inside, *(first for first, _ in spans), 1]))


def docstring_lines(nodes: Sequence[ast.stmt]) -> set[int]:
    texts = [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Expr)]
    return {n for text in texts if is_docstring(text) for n in range(text.lineno, (text.end_lineno or 0) + 1)}

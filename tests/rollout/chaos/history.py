"""Check what a run trained on against the replies that its servers sent.

    server      --> Reply: prompt, tokens, log-probs, versions, and the fault of it, if any
    record      --> TrainedRow: tokens, log-probs and versions of each token, step

lost      a prompt or sample that no step trained on
doubled   one that a step trained on again
too_old   a token that is staler than the bound, or of weights that did not exist yet
poisoned  sampled tokens that are not those of intact replies to the tokens before them
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Reply:
    """One reply as the client received it; `fault` is "" for an intact one."""

    server: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    fault: str = ""


@dataclass(frozen=True)
class TrainedRow:
    """One row of a step: its real tokens, in the order of the sequence."""

    step: int  # also the version of the weights that trained on it
    prompt_id: int
    sample_id: int
    tokens: np.ndarray  # int [T]
    sampled: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int [T]

    @property
    def name(self) -> str:
        return f"step {self.step}, prompt {self.prompt_id}, sample {self.sample_id}"


@dataclass(frozen=True)
class Plan:
    """What the run had to do.

    Args:
        batch_size: prompts per step.
        n_samples: rows per prompt.
        staleness: the bound, in versions.
        num_steps: all steps of the run.
    """

    batch_size: int
    n_samples: int
    staleness: int
    num_steps: int


@dataclass
class Violations:
    """Messages of what is wrong, by kind."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)
    poisoned: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # the run itself: an error, or no progress

    def __bool__(self) -> bool:
        return any(vars(self).values())


def check_history(rows: Sequence[TrainedRow], replies: Iterable[Reply], plan: Plan) -> Violations:
    found = Violations()
    check_counts(rows, plan, found)
    for row in rows:
        check_versions(row, plan.staleness, found)
    by_prompt: defaultdict[tuple[int, ...], list[Reply]] = defaultdict(list)
    for reply in replies:
        by_prompt[reply.prompt].append(reply)
    for row in rows:
        check_tokens(row, by_prompt, found)
    return found


def check_counts(rows: Sequence[TrainedRow], plan: Plan, found: Violations) -> None:
    seen = Counter((row.prompt_id, row.sample_id) for row in rows)
    num_prompts = plan.num_steps * plan.batch_size
    expected = {(p, s) for p in range(num_prompts) for s in range(plan.n_samples)}
    found.doubled += [f"prompt {p}, sample {s}: in {n} rows" for (p, s), n in sorted(seen.items()) if n > 1]
    found.doubled += [f"prompt {p}, sample {s}: not of the run" for p, s in sorted(seen.keys() - expected)]
    found.lost += [f"prompt {p}, sample {s}: in no row" for p, s in sorted(expected - seen.keys())]


def check_versions(row: TrainedRow, staleness: int, found: Violations) -> None:
    versions = row.versions[row.sampled]
    if not len(versions):
        found.lost.append(f"{row.name}: no sampled token")
        return
    oldest, newest = int(versions.min()), int(versions.max())
    if row.step - oldest > staleness:
        found.too_old.append(
            f"{row.name}: a token of version {oldest}, {row.step - oldest} behind, the bound is {staleness}"
        )
    if newest > row.step:
        found.too_old.append(f"{row.name}: a token of version {newest}, which was not trained yet")


def check_tokens(row: TrainedRow, by_prompt: dict[tuple[int, ...], list[Reply]], found: Violations) -> None:
    changes = np.flatnonzero(np.diff(row.sampled.astype(np.int8), prepend=0, append=0))
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        intact = chain_end(row, int(start), int(end), by_prompt)
        if intact == end:
            continue
        culprits = sorted(
            {
                f"{reply.fault} from {reply.server}"
                for reply in by_prompt.get(tuple(map(int, row.tokens[:intact])), ())
                if reply.fault and matches(reply, row, intact, int(end))
            }
        )
        reason = f"as in a spoiled reply: {', '.join(culprits)}" if culprits else "nor any spoiled one"
        found.poisoned.append(
            f"{row.name}: no intact reply has the {end - intact} sampled tokens from {intact} on, which begin "
            f"{row.tokens[intact : intact + 4].tolist()} with log-probs {row.logprobs[intact : intact + 4].tolist()} of version "
            f"{row.versions[intact]}; {reason}"
        )


def chain_end(row: TrainedRow, start: int, end: int, by_prompt: dict[tuple[int, ...], list[Reply]]) -> int:
    furthest, open_at, tried = start, [start], set()
    while open_at:
        at = open_at.pop()
        if at == end:
            return end
        if at in tried:
            continue
        tried.add(at)
        furthest = max(furthest, at)
        for reply in by_prompt.get(tuple(map(int, row.tokens[:at])), ()):
            if not reply.fault and reply.tokens and matches(reply, row, at, end):
                open_at.append(at + len(reply.tokens))
    return furthest


def matches(reply: Reply, row: TrainedRow, at: int, end: int) -> bool:
    """Return whether a reply's tokens, log-probs and versions are those of the row from `at`."""
    stop = at + len(reply.tokens)
    return (
        stop <= end
        and np.array_equal(row.tokens[at:stop], reply.tokens)
        and np.array_equal(row.versions[at:stop], reply.versions)
        and np.array_equal(row.logprobs[at:stop], np.array(reply.logprobs, np.float32), equal_nan=True)
    )

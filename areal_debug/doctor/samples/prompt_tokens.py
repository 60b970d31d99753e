"""S07 and S08: prompts that are drawn too often, and prompt tokens in the loss mask."""

import numpy as np

from areal_debug.doctor.samples.evidence import Finding, finding, has_support, share
from areal_debug.doctor.samples.read import Rows

REPEATED, FEWEST_REPEATS, TIMES_EXPECTED = 0.2, 10, 3.0
FEWEST_STEPS = 3
LEAKED, SHORTEST_PREFIX, FEWEST_GROUPS = 0.5, 4, 8
IMPOSSIBLE = -30.0  # log-probability that samples share their beginning by chance


def split_groups(rows: Rows) -> Finding | None:
    """S07: each row is a group of its own, and each prompt of a step comes several times."""
    known = (rows.content != 0) & (rows.group >= 0) & np.isfinite(rows.reward)
    if not has_support(rows, known) or len(np.unique(rows.group[known])) < known.sum():
        return None
    keys = np.stack([rows.step, rows.content])[:, known]
    prompts, counts = np.unique(keys, axis=1, return_counts=True)
    of_step = np.unique(prompts[0], return_counts=True)[1]
    is_few = len(np.unique(prompts[1])) < 2 * of_step.max()  # then repeats cannot be avoided
    if is_few or len(of_step) < FEWEST_STEPS or (times := np.gcd.reduce(counts)) < 2:
        return None
    found = f"each of {int(known.sum())} rows is a group of its own, and each prompt comes {times} times in its step"
    return finding("S07", found, rows, known, known, title="split")


def repeated_prompts(rows: Rows) -> Finding | None:
    """S07: several groups of one step have the same prompt, more than random draws would."""
    known = (rows.content != 0) & (rows.group >= 0)
    groups, first = np.unique(rows.group[known], return_index=True)
    if len(groups) < FEWEST_REPEATS:
        return None
    step, content = rows.step[known][first], rows.content[known][first]
    num_distinct = len(np.unique(content))
    again = np.zeros(len(groups), bool)
    expected = 0.0
    for number in np.unique(step):
        here = np.flatnonzero(step == number)
        if len(here) > num_distinct / 2:  # a data set of a few prompts: repeats cannot be avoided
            return None
        _, of_group, counts = np.unique(content[here], return_inverse=True, return_counts=True)
        again[here] = counts[of_group] > 1
        expected += len(here) * (len(here) - 1) / num_distinct  # groups that share a random draw
    if again.sum() < max(FEWEST_REPEATS, TIMES_EXPECTED * expected) or again.mean() < REPEATED:
        return None
    flagged = known & np.isin(rows.group, groups[again])
    if len(np.unique(rows.step[flagged])) < FEWEST_STEPS:
        return None
    found = (
        f"{int(again.sum())} of {len(groups)} groups share their prompt with another group of the step; random draws "
        f"from {num_distinct} prompts would give {expected:.0f}"
    )
    return finding("S07", found, rows, flagged, known, title="repeated")


def prompt_in_loss(rows: Rows) -> Finding | None:
    """S08: the loss mask covers tokens of the prompt."""
    by_length = (rows.prompt_length > 0) & (rows.first < rows.prompt_length) & (rows.lengths > 0)
    by_prefix, prefix = shared_beginnings(rows)
    flagged = by_length | by_prefix
    among = (rows.prompt_length > 0) | (prefix >= 0)
    if not has_support(rows, flagged) or share(flagged, among) < LEAKED:
        return None
    sizes = np.where(by_length, rows.prompt_length - rows.first, prefix)[flagged]
    found = (
        f"{share(flagged, among):.0%} of the completions begin with tokens that every sample of their group has and "
        f"that were not sampled: {float(np.median(sizes)):.0f} tokens in the median"
    )
    return finding(
        "S08", found, rows, flagged, among, lambda row: rows.decode(rows.tokens(row)[:40].tolist())
    )


def shared_beginnings(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] bool: a row begins with its prompt; and [n] the length of what its group shares.

    All samples of a group begin alike, other prompts' samples do not, and the samples' log-probs
    say that they cannot have been sampled alike by chance; or no log-prob can be of a sampled
    token, since the row's first token is in the mask.
    """
    flagged, prefix = np.zeros(len(rows), bool), np.full(len(rows), -1, np.int64)
    beginnings = []
    for members in rows.groups(rows.lengths > 0):
        tokens = [rows.tokens(row) for row in members.tolist()]
        if len({t.tobytes() for t in tokens}) < 3:  # a group that collapsed shares everything
            continue
        beginnings.append((members, common_length(tokens), tokens[0]))
    if len(beginnings) < FEWEST_GROUPS:
        return flagged, prefix
    habit = common_habit([tokens[:length] for _, length, tokens in beginnings])
    for members, length, _ in beginnings:
        prefix[members] = length
        own = length - habit
        if own < SHORTEST_PREFIX:
            continue
        first = rows.bounds[members[0]]
        logprobs = rows.logprobs[first + habit : first + length].astype(np.float64)
        is_known = np.isfinite(logprobs).all()
        is_not_sampled = (
            is_known
            and not logprobs.any()
            and rows.logprobs[first + length : rows.bounds[members[0] + 1]].any()
        )
        by_chance = (len(members) - 1) * logprobs.sum() if is_known else 0.0
        from_start = (rows.first[members] == 0).all() and (rows.content[members] == 0).all()
        flagged[members] = (
            by_chance < IMPOSSIBLE
            or is_not_sampled
            or (from_start and (rows.prompt_length[members] != 0).all() and own >= 8)
        )
    return flagged, prefix


def common_length(tokens: list[np.ndarray]) -> int:
    shortest = min(map(len, tokens))
    same = np.ones(shortest, bool)
    for other in tokens[1:]:
        same &= other[:shortest] == tokens[0][:shortest]
    return shortest if same.all() else int(same.argmin())


def common_habit(beginnings: list[np.ndarray]) -> int:
    """Return how many first tokens most groups share with each other: a template, or a habit."""
    length = 0
    while True:
        here = [b[length] for b in beginnings if len(b) > length]
        if len(here) < len(beginnings) / 2:
            return length
        if np.unique(here, return_counts=True)[1].max() < len(beginnings) / 2:
            return length
        length += 1

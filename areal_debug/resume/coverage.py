"""Which rows of a data set a record trained on: never, twice, with how many samples.

    groups of the record, in order ──> rows of the data, by prompt and order ──> passes ──> counts

A row is lost if rows after it in the data were trained on long before the record's end, and it
never was. Where the data is read in another order than its own, only a whole pass decides.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from areal_debug.doctor.read import flat
from areal_debug.record.decode import load_decoder
from areal_debug.report.model import Facts, Report, Row, rows_of, tone_of
from areal_debug.reward.answers import question_of
from areal_debug.reward.rescore import DataRows, row_texts
from recorder import Record

LEAST_SHARE, FEWEST = 0.01, 3  # of the rows, and rows, that are worth a verdict
PATIENCE = 4  # steps that a row may be in flight after rows behind it
DISORDER = 3  # batches between two groups that follow each other, where the data is read in order
IN_ORDER = 1 / 8  # of the distance of equal rows: a shuffled order has a median step of 0.29 of it
IN_PLACE = 0.9  # of the rows of a pass have the place that they had in the pass before
WHOLE_GROUPS = 0.8  # of the groups have the usual size
NUMBER = "number of the row"
RESHUFFLING = ("trl", "verl", "rllm", "slime", "miles", "nemo-rl", "skyrl", "areal")  # for each pass
MOST_PLACES = 256  # of one text in the data


@dataclass(frozen=True)
class Group:
    """The samples of one prompt in one step."""

    step: int
    prompt: int
    size: int
    places: tuple[int, ...]  # rows of the data with this prompt


@dataclass(frozen=True)
class Coverage:
    """What was trained on: `verdict` is complete, incomplete or unknown.

    Attributes:
        findings: one sentence for each problem; `notes`: what is unknown, and why.
        lost: rows of the data that were read and never trained on; `twice`: trained on again before
            the data's end.
        sizes: number of groups by their samples.
    """

    verdict: str
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    num_rows: int
    num_groups: int
    unmatched: int
    lost: tuple[int, ...]
    twice: tuple[int, ...]
    sizes: dict[int, int]


def groups_of(record: Record, data: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the groups of a record in its order, with the places of their prompts in the data.

    Raises ValueError if the record has neither text nor its tokenizer.
    """
    rows = DataRows([{**row, NUMBER: number} for number, row in enumerate(data)])
    texts = [question_of(row, None).prompt.strip() for row in data]
    places: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        places.setdefault(text, []).append(number)
    decode = load_decoder(record, skip_special_tokens=True)
    found, known = [], dict[str, tuple[int, ...]]()
    for step in map(record.step, record.steps):
        sizes, prompts = Counter[int](), dict[int, str]()
        for rank in step.ranks:
            numbers = step.batch(rank, ["prompt_id"])["prompt_id"]
            is_known = step.known(rank, "prompt_id")
            # rows of data, which nobody sampled, are groups by their prompt
            read = is_known | ~step.known(rank, "rewards")
            for one in row_texts(step, rank, decode, read.nonzero()[0].tolist()):
                number = int(numbers[one.row]) if is_known[one.row] else hash(one.prompt)
                sizes[number] += 1
                prompts.setdefault(number, one.prompt)
        for prompt, text in prompts.items():
            if text not in known:
                row = rows.find(text)
                known[text] = () if row is None else tuple(places[texts[row[NUMBER]]][:MOST_PLACES])
            found.append(Group(step.manifest.step, prompt, sizes[prompt], known[text]))
    return found


def placed(groups: Sequence[Group]) -> list[int]:
    """Choose a row of the data for each group, so that the order changes least (Viterbi)."""
    costs, came = np.zeros(len(groups[0].places)), []
    for before, group in pairwise(groups):
        apart = np.array(group.places)[None] - np.array(before.places)[:, None] - 1
        total = costs[:, None] + np.log1p(np.abs(apart))
        came.append(total.argmin(0))
        costs = total.min(0)
    at, found = int(costs.argmin()), []
    for number in range(len(groups) - 1, -1, -1):
        found.append(groups[number].places[at])
        at = int(came[number - 1][at]) if number else 0
    return found[::-1]


def passes_of(rows: Sequence[int], disorder: int) -> list[int]:
    """Return the number of the pass over the data of each row; one begins with a jump back.

    A jump is farther than `disorder`, and the rows after it stay there.
    """
    number, top, found = 0, -1, []
    for at, row in enumerate(rows):
        if max(rows[at : at + 3]) < top - disorder:
            number, top = number + 1, -1
        top = max(top, row)
        found.append(number)
    return found


def is_on(config: dict[str, Any], *words: str) -> bool:
    """Return whether an option is on whose name, or that of its section, has one of some words."""
    every = dict(flat(config))
    off = tuple(name[:-6] for name, value in every.items() if name.endswith(".enable") and value is False)
    named = [name for name in every if any(word in name.lower() for word in words)]
    return any(every[name] not in (None, False, "", 0) and not name.startswith(off) for name in named)


def has_one_order(groups: Sequence[Group], num_rows: int) -> bool:
    """Return whether a second pass over the data, half of it at least, has its rows in the first one's order."""
    order = [group.places for group in groups]
    period = order.index(order[0], 1) if order[0] in order[1:] else len(order)
    again = [one == other for one, other in zip(order, order[period:], strict=False)]
    is_whole = len(set(order[:period])) == period >= num_rows / 2 and len(again) >= period / 2
    return is_whole and float(np.mean(again)) >= IN_PLACE


def coverage_of(record: Record, data: Sequence[dict[str, Any]]) -> Coverage:
    """Count what a record trained on. Raises ValueError if its prompts cannot be read."""
    every = groups_of(record, data)
    groups, sizes = [group for group in every if group.places], Counter(group.size for group in every)
    findings, notes, lost, twice = list[str](), list[str](), list[int](), list[int]()
    if len(groups) < len(every):
        notes.append(
            f"{len(every) - len(groups)} of {len(every)} groups have a prompt that is not in the data"
        )
    if len(groups) > 1:
        rows = placed(groups)
        batch = len(groups) // len({group.step for group in groups})
        apart, alike = np.median(np.abs(np.diff(rows))), np.median([len(group.places) for group in groups])
        in_order = IN_ORDER * len(data) / alike
        is_shuffled = apart > min(DISORDER * batch, max(1, in_order))
        if not is_shuffled:
            lost, twice, findings = judge(groups, rows, len(data), DISORDER * batch)
        if is_shuffled or (findings and alike > 1 and in_order <= 1):
            lost, twice, findings, unknown = judge_shuffled(groups, len(data), batch)
            notes += unknown
    is_unknown = bool(notes)
    if len(groups) > 1 and has_one_order(groups, len(data)) and is_on(record.header.config, "shuffle"):
        text = "each pass has the rows in one order, and an option shuffles them: one seed for all passes"
        is_meant = record.header.trainer not in (None, *RESHUFFLING)
        (notes if is_meant else findings).append(f"{text}{', unless the trainer shuffles once' * is_meant}")
    if len(groups) > 1 and not is_shuffled and (skipped := min(rows)) > DISORDER * batch:
        text = f"rows 0 to {skipped - 1} come before the first that was trained on: "
        (notes if record.steps[0] else findings).append(f"{text}skipped, or of another segment")
    if lost:
        size = [len(question_of(row, None).prompt) for row in data]
        mean, of_lost = np.mean([size[row] for row in rows]), np.mean([size[row] for row in lost])
        notes.append(
            f"prompts that were lost have {of_lost:.0f} characters on average, the others {mean:.0f}"
        )
    if lost and is_on(record.header.config, "dynamic_sampling", "dynamic_filter", "filter_groups"):
        notes.append(
            f"{len(lost)} prompts were read and left out: the configuration filters groups, which may be why"
        )
        is_unknown = True
        findings = [text for text in findings if "never trained" not in text]
    usual = sizes.most_common(1)[0] if sizes else (0, 0)
    odd = {size: count for size, count in sizes.items() if size != usual[0]}
    if odd and usual[1] >= WHOLE_GROUPS * len(every):
        text = ", ".join(f"{count} with {size}" for size, count in sorted(odd.items()))
        findings.append(f"groups with too few or too many rows: {text}; {usual[1]} groups have {usual[0]}")
    is_unknown = is_unknown or len(groups) < 2
    verdict = "incomplete" if findings else "unknown" if is_unknown else "complete"
    return Coverage(
        verdict, tuple(findings), tuple(notes), len(data), len(every), len(every) - len(groups),
        tuple(lost), tuple(twice), dict(sizes),
    )  # fmt: skip


def judge(
    groups: Sequence[Group], rows: Sequence[int], num_rows: int, disorder: int
) -> tuple[list[int], list[int], list[str]]:
    """Return the rows that were lost and that were trained on twice, and the findings."""
    lost, twice, findings = list[int](), list[int](), list[str]()
    steps = sorted({group.step for group in groups})
    numbers = passes_of(rows, max(8, disorder))
    for number in range(numbers[-1] + 1):
        own = [at for at, one in enumerate(numbers) if one == number]
        seen = Counter(rows[at] for at in own)
        first, top = min(seen), max(seen)
        until = steps[max(0, len(steps) - 1 - PATIENCE)] if number == numbers[-1] else steps[-1] + 1
        behind = max((rows[at] for at in own if groups[at].step <= until), default=first)
        lost += [row for row in range(first, behind) if row not in seen]
        twice += [row for row, count in seen.items() if count > 1]
        if number < numbers[-1] and top < num_rows - 1 - disorder:
            again = sorted(set(seen) & {rows[at] for at, one in enumerate(numbers) if one == number + 1})
            step = groups[own[-1]].step
            twice += again
            findings.append(
                f"the data is read again from row {again[0] if again else 0} on after step {step}, before its end: {len(again)} prompts "
                f"were trained on twice, and rows {top + 1} to {num_rows - 1} never"
            )
    limit = max(FEWEST, LEAST_SHARE * len(rows))
    if len(lost) >= limit:
        shown = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        findings.insert(
            0,
            f"{len(lost)} prompts of {len(lost) + len(set(rows))} that were read were never trained on: rows {shown} of the data "
            "are missing between rows that were; finished groups were dropped, or their requests lost",
        )
    if len(twice) >= limit and not any("read again" in text for text in findings):
        findings.append(
            f"{len(twice)} prompts were trained on twice in one pass: rows {sorted(twice)[:8]} of the data"
        )
    return lost, twice, findings


def judge_shuffled(
    groups: Sequence[Group], num_rows: int, batch: int
) -> tuple[list[int], list[int], list[str], list[str]]:
    """Return the rows that were lost and trained on twice, the findings, and what is unknown.

    In any order a pass over the data has each row once, but for a last batch that is not whole.
    """
    passes = (len(groups) - PATIENCE * batch) // num_rows
    most = -(-len(groups) // max(1, num_rows - batch + 1))
    if passes < 1:
        why = "the data is read in another order, or many rows are equal: a whole pass shows what is lost"
        return [], [], [], [why]
    times = Counter(group.places for group in groups)
    seldom = [places for places, number in times.items() if number < passes * len(places)]
    often = [places for places, number in times.items() if number > most * len(places)]
    lost = sorted({*range(num_rows)}.difference(*times).union(*seldom))
    twice = sorted(set().union(*often))
    limit = max(FEWEST, LEAST_SHARE * num_rows)
    if min(len(lost), len(twice)) >= limit:
        return [], [], [], ["rows are trained on as chance draws them, not once in a pass over the data"]
    if len(lost) >= max(limit, batch * most):
        how = f"were never trained on in a whole pass over the data: rows {lost[:8]}"
        return lost, [], [f"{len(lost)} prompts of {num_rows} {how}"], []
    if len(twice) >= limit:
        how = f"were trained on more than {most} times: rows {twice[:8]}"
        return [], twice, [f"{len(twice)} prompts of {num_rows} {how}"], []
    return [], [], [], []


def report_of(found: Coverage) -> Report:
    """Return the verdict, the findings and the counts."""
    word = "Inconclusive" if found.verdict == "unknown" else found.verdict.capitalize()
    sentence, *also = found.findings or [f"{found.num_groups} groups of {found.num_rows} rows of data"]
    sizes = ", ".join(f"{count} with {size} rows" for size, count in sorted(found.sizes.items()))
    rows = [*rows_of("also", also, "bad"), Row("groups", sizes), *rows_of("note", found.notes, "unsure")]
    refuted = "the trainer's own count of rows that it read, if it equals what was trained on"
    return Report(word, sentence, tone_of(found.verdict), [Facts([*rows, Row("refuted if", refuted, "dim")])])

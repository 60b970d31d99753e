"""S05 and S06: broken formats, and rewarded samples that hedge or contradict each other."""

import re

import numpy as np

from areal_debug.doctor.samples.evidence import FEWEST_ROWS, Finding, finding, has_support, lower_bound, share
from areal_debug.doctor.samples.phrases import terminal_tokens
from areal_debug.doctor.samples.read import Rows
from areal_debug.record.decode import special_texts

MOST_TEXTS = 4000
TAG = re.compile(r"<(/?)([A-Za-z_][\w-]{1,30})>")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX, HASHES = re.compile(r"\\boxed\{([^{}]*)\}"), re.compile(r"####\s*(\S+)")
USED = 0.3  # share of the completions that open a tag, for it to be of the format
BROKEN_LATE, RISE, BROKEN_PAID = 0.10, 2.0, 0.5
HEDGES = 3  # different final answers in one completion
HEDGED_PAID = 0.02


def chosen_texts(rows: Rows) -> dict[int, str]:
    """Return the completions of evenly spaced finished rows, by row; empty without a tokenizer."""
    found = np.flatnonzero(rows.ended)
    if not rows.has_text or not len(found):
        return {}
    picked = found[np.unique(np.linspace(0, len(found) - 1, MOST_TEXTS).round().astype(int))]
    return {row: rows.text(row) for row in picked.tolist()}


def broken_format(rows: Rows, texts: dict[int, str]) -> Finding | None:
    """S05: tags, boxes or code fences stay open, more often than at the beginning, or rewarded."""
    if len(texts) < 5 * FEWEST_ROWS:
        return None
    control = control_texts(rows)
    counts = {row: tag_counts(without(control, text)) for row, text in texts.items()}
    names = {name for opened in counts.values() for name in opened}
    usual = {name for name in names if sum(name in opened for opened in counts.values()) >= USED * len(texts)}
    broken, among = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    among[list(texts)] = True
    left = {
        row: {name for name in usual & opened.keys() if opened[name] > 0} for row, opened in counts.items()
    }
    broken[[row for row, names in left.items() if names]] = True
    before, after = share(broken, among & rows.early), share(broken, among & rows.late)
    num_late = (among & rows.late).sum()
    is_worse = (
        after >= BROKEN_LATE
        and after >= RISE * before
        and lower_bound((broken & rows.late).sum(), num_late) >= before
        and has_support(rows, broken & rows.late)
    )
    paid = broken & rows.high
    is_paid = has_support(rows, paid) and share(rows.high, broken) >= BROKEN_PAID
    if not is_worse and not is_paid:
        return None
    open_marks = sorted(set[str]().union(*left.values()))
    found = (
        f"{', '.join(open_marks[:5])} stay open in {before:.0%} of the early and {after:.0%} of the late "
        f"completions; {share(rows.high, broken):.0%} of the broken ones are rewarded"
    )
    return finding(
        "S05", found, rows, paid if is_paid else broken, among, title="paid" if is_paid else "broken"
    )


def control_texts(rows: Rows) -> frozenset[str]:
    """Return what looks like an open tag and is a special token, or ends most completions.

    Gemma ends a turn with `<end_of_turn>`, other models with `<eos>`: nothing closes these.
    """
    ends = {rows.decode([token]).strip() for token in terminal_tokens(rows).tolist()}
    found = (TAG.fullmatch(text) for text in special_texts(rows.record) | ends)
    return frozenset(match[0] for match in found if match is not None and not match[1])


def without(control: frozenset[str], text: str) -> str:
    for token in control:
        text = text.replace(token, "")
    return text


def tag_counts(text: str) -> dict[str, int]:
    opened: dict[str, int] = {}
    for closing, name in TAG.findall(text):
        if not closing:
            opened[f"<{name}>"] = opened.get(f"<{name}>", 0) + 1
        elif f"<{name}>" in opened:
            opened[f"<{name}>"] -= 1
    if boxes := text.count("\\boxed{"):
        opened["\\boxed{"] = boxes - len(re.findall(r"\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}", text))
    if fences := text.count("```"):
        opened["```"] = fences % 2
    return opened


def hedges(rows: Rows, texts: dict[int, str]) -> Finding | None:
    """S06: rewarded completions give several final answers."""
    hedged, among = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    for row, text in texts.items():
        answers = final_answers(text)
        among[row], hedged[row] = bool(answers), len(set(answers)) >= HEDGES
    paid = hedged & rows.high
    is_paid = share(rows.high, hedged) >= BROKEN_PAID and share(hedged, among & rows.late) >= HEDGED_PAID
    if not has_support(rows, paid) or not is_paid:
        return None
    found = (
        f"{int(hedged.sum())} of {int(among.sum())} completions give {HEDGES} or more different final answers, and "
        f"{share(rows.high, hedged):.0%} of them are rewarded ({share(rows.high, among & ~hedged):.0%} of the others)"
    )
    return finding("S06", found, rows, paid, among, lambda row: "; ".join(final_answers(texts[row])))


def final_answers(text: str) -> list[str]:
    for pattern in (ANSWER, BOX, HASHES):
        if found := pattern.findall(text):
            return [answer.strip() for answer in found]
    return []


def contradicts(rows: Rows, texts: dict[int, str]) -> Finding | None:
    """S11: finished samples of one prompt with different final answers all have the full reward."""
    if not rows.is_binary:
        return None
    by_group: dict[int, dict[str, list[int]]] = {}
    for row, text in texts.items():
        if rows.high[row] and rows.group[row] >= 0 and (answers := final_answers(text)):
            by_group.setdefault(int(rows.group[row]), {}).setdefault(answers[-1], []).append(row)
    several = {group: answers for group, answers in by_group.items() if sum(map(len, answers.values())) > 1}
    split = {group: answers for group, answers in several.items() if len(answers) > 1}
    flagged, among = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    for group, of_group in several.items():
        members = [row for of_answer in of_group.values() for row in of_answer]
        among[members], flagged[members] = True, group in split
    if len(split) < FEWEST_ROWS or len(split) < 0.5 * len(several) or not has_support(rows, flagged):
        return None
    found = f"in {len(split)} of {len(several)} groups with rewarded final answers these differ"
    return finding("S11", found, rows, flagged, among, lambda row: "; ".join(final_answers(texts[row])))

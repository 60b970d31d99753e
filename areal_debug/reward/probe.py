"""Try answers on a reward function and judge what it pays for.

    right and wrong answers in each format ──> the formats that are paid, and the scale of the reward
    each kind of answers in these formats  ──> paid (above half of the scale), or more than without it

The scale is the reward of right answers minus that of wrong ones in the same format, so a function
may return -1 and 1, or 10. The function runs in processes that are killed when they are stuck.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import mean, median

from areal_core.errors import RewardError
from areal_core.reward import RewardPool
from areal_debug.reward.answers import FORMATS, KINDS, Kind, Question, Setting, both_orders, hostile_texts

RAISED = "raised RewardError: "
NOT_FOUND = f"{RAISED}reward function"
PAID, MORE = 0.5, 0.1  # shares of the scale
MOST_FORMATS = 3  # that the manipulated answers are tried in
ROUNDING = 1e-9
MOST_LATE = 2  # calls of a kind that run out of time, until the rest of it is left out

Outcomes = list[tuple[Question, str, float | str]]  # an answer, and its reward or what went wrong


@dataclass(frozen=True)
class Finding:
    """What happened with one kind of answers.

    Attributes:
        paid: answers with more than half of the scale; `more`: those that are paid at least a tenth
            of the scale more than the same answer without the addition.
        failed: calls that raised, returned no finite number or ran out of time; `failure` is one.
        verdict: "pays", "pays more", "fails", "not paid" (of right answers, no problem), "ok".
    """

    kind: str
    expected: str
    tried: int
    paid: int
    more: int
    failed: int
    mean_reward: float | None
    verdict: str
    example: str = ""
    failure: str = ""

    @property
    def is_problem(self) -> bool:
        """True if the function must not be trained on as it is."""
        return self.verdict in ("pays", "pays more", "fails")


@dataclass(frozen=True)
class ProbeReport:
    """What a reward function pays for. `formats` are those in which right answers are paid."""

    function: str
    data: str
    num_rows: int
    num_calls: int
    right: float | None
    wrong: float | None
    formats: tuple[str, ...]
    findings: tuple[Finding, ...]
    verdict: str
    sentence: str
    notes: tuple[str, ...] = ()


@dataclass
class Caller:
    """Call a function through its pool and count the calls."""

    pool: RewardPool
    num_calls: int = 0

    def rewards(self, calls: Iterable[tuple[Question, str]]) -> Outcomes:
        """Return the reward of each answer, or the sentence of what went wrong."""
        running: list[tuple[Question, str, Future[float]]] = []
        results: Outcomes = []
        late = 0
        for question, text in calls:
            if late >= MOST_LATE:
                break
            running.append((question, text, self.submit(question, text)))
            if len(running) < 8:
                continue
            results += [(q, t, outcome_of(call)) for q, t, call in running]
            running = []
            late = sum(str(outcome).startswith("did not return within") for *_, outcome in results)
        return results + [(q, t, outcome_of(call)) for q, t, call in running]

    def submit(self, question: Question, text: str) -> "Future[float]":
        """Call the function with bytes in the place of tokens."""
        self.num_calls += 1
        prompt_ids, ids = (list(part.encode("utf-8", "replace")) for part in (question.prompt, text))
        return self.pool.submit(question.prompt, text, prompt_ids, ids, **question.row)


def outcome_of(call: "Future[float]") -> float | str:
    """Return the reward, or what went wrong without the name and the row."""
    try:
        return call.result()
    except RewardError as error:
        return str(error).partition(" ")[2].splitlines()[0]


@dataclass(frozen=True)
class Scale:
    """Rewards of right and wrong answers by format, medians over questions."""

    right: dict[str, float]
    wrong: dict[str, float]
    failures: tuple[str, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats in which a right answer is paid more than half of the best, the best first."""
        gaps = {name: self.right[name] - self.wrong[name] for name in self.right.keys() & self.wrong.keys()}
        best = max(gaps.values(), default=0.0)
        found = [name for name in FORMATS if best > 0 and name in gaps and gaps[name] > PAID * best]
        return tuple(sorted(found, key=lambda name: -gaps[name]))

    @property
    def ends(self) -> tuple[float, float] | None:
        """Rewards of a right and a wrong answer where they differ most; None if nowhere."""
        if not self.formats:
            return None
        return self.right[self.formats[0]], self.wrong[self.formats[0]]

    def usual(self, expected: str) -> float:
        """Return the largest share that right, or wrong, answers have in any format."""
        values = self.right if expected == "right" else self.wrong
        return max(map(self.share, values.values()), default=0.0)

    def is_neutral(self, reward: float) -> bool:
        right, wrong = self.ends or (1.0, 0.0)
        return reward == 0 and wrong < 0 < right

    def share(self, reward: float) -> float:
        """Return a reward as a share of the scale: 0 is wrong, 1 is right."""
        right, wrong = self.ends or (1.0, 0.0)
        return (reward - wrong) / (right - wrong)


def probe(function: str, data: str, questions: Sequence[Question], timeout_s: float) -> ProbeReport:
    """Try every kind of answer. Raises RewardError if the function cannot be imported."""
    with RewardPool(function, timeout_s, num_workers=2, max_retries=0, timeout_reward=None) as pool:
        caller = Caller(pool)
        return judge(caller, function, data, questions)


def judge(caller: Caller, function: str, data: str, questions: Sequence[Question]) -> ProbeReport:
    """Measure the scale, try each kind, and return the report."""
    golds = tuple(q.gold for q in questions if q.gold is not None)
    scale = measure_scale(caller, [q for q in questions if q.gold is not None], golds)
    setting = Setting(scale.formats[:MOST_FORMATS] or tuple(FORMATS)[:MOST_FORMATS], golds)
    findings = [try_kind(caller, kind, questions, setting, scale) for kind in KINDS]
    findings += [try_formats(scale), try_orders(caller, questions, setting, scale)]
    findings.append(try_hostile(caller, questions[0], setting, scale))
    findings.append(try_repeats(caller, questions, setting))
    findings = [finding for finding in findings if finding.tried]
    verdict, sentence = verdict_of(scale, golds, findings)
    right, wrong = scale.ends or (None, None)
    return ProbeReport(
        function, data, len(questions), caller.num_calls, right, wrong, scale.formats, tuple(findings),
        verdict, sentence, notes_of(scale, golds, questions),
    )  # fmt: skip


def measure_scale(caller: Caller, questions: Sequence[Question], golds: tuple[str, ...]) -> Scale:
    """Return the rewards of right and wrong answers in each format.

    Raises RewardError if the function cannot be imported.
    """
    setting = Setting((), golds)
    sides: tuple[dict[str, float], dict[str, float]] = ({}, {})
    failures = []
    for name, template in FORMATS.items():
        answers = [(q, q.gold or "", setting.wrong_for(q)) for q in questions]
        for side, column in zip(sides, (1, 2), strict=True):
            outcomes = caller.rewards((answer[0], template.format(answer[column])) for answer in answers)
            rewards = [outcome for *_, outcome in outcomes if isinstance(outcome, float)]
            failures += [outcome for *_, outcome in outcomes if isinstance(outcome, str)]
            if rewards:
                side[name] = median(rewards)
    if failures and all(failure.startswith(NOT_FOUND) for failure in failures):
        raise RewardError(failures[0].removeprefix(RAISED))
    return Scale(*sides, tuple(failures))


def try_kind(
    caller: Caller, kind: Kind, questions: Sequence[Question], setting: Setting, scale: Scale
) -> Finding:
    chosen = [q for q in questions if q.gold is not None or not kind.needs_gold]
    outcomes = caller.rewards((q, text) for q in chosen for text in kind.texts(q, setting))
    return finding_of(kind.name, kind.expected, outcomes, scale)


def finding_of(name: str, expected: str, outcomes: Outcomes, scale: Scale) -> Finding:
    rewards = [(text, outcome) for _, text, outcome in outcomes if isinstance(outcome, float)]
    failures = [(text, outcome) for _, text, outcome in outcomes if isinstance(outcome, str)]
    paid = [text for text, reward in rewards if scale.share(reward) > PAID + ROUNDING]
    usual = scale.usual(expected)
    more = [
        text
        for text, reward in rewards
        if scale.share(reward) > usual + MORE - ROUNDING and not scale.is_neutral(reward)
    ]
    if expected == "wrong" and paid:
        verdict, examples = "pays", paid
    elif more:
        verdict, examples = "pays more", more
    elif failures:
        verdict, examples = "fails", [text for text, _ in failures]
    elif expected == "right" and len(paid) < len(rewards):
        verdict, examples = "not paid", [text for text, _ in rewards if text not in paid]
    else:
        verdict, examples = "ok", [""]
    return Finding(
        name, expected, len(outcomes), len(paid), len(more), len(failures),
        mean(reward for _, reward in rewards) if rewards else None,
        verdict, min(examples, key=len), failures[0][1] if failures else "",
    )  # fmt: skip


def try_orders(caller: Caller, questions: Sequence[Question], setting: Setting, scale: Scale) -> Finding:
    """Try a right and a wrong last answer in both orders, of which at most one may be paid."""
    pairs = [(q, pair) for q in questions if q.gold is not None for pair in both_orders(q, setting)]
    paid = []
    for place in (0, 1):
        outcomes = caller.rewards((q, pair[place]) for q, pair in pairs)
        shares = [scale.share(o) if isinstance(o, float) else 0.0 for *_, o in outcomes]
        paid.append([share > PAID + ROUNDING for share in shares])
    both = [pair[0] for (_, pair), *sides in zip(pairs, *paid, strict=False) if all(sides)]
    return counted("right and wrong, in either order", "wrong", len(pairs), both, "pays")


def try_hostile(caller: Caller, question: Question, setting: Setting, scale: Scale) -> Finding:
    """Try texts that break parsers: the function must return a finite number in time."""
    outcomes = caller.rewards((question, text) for text in hostile_texts(setting.formats[:1]))
    return finding_of("text that breaks parsers", "wrong", outcomes, scale)


def try_repeats(caller: Caller, questions: Sequence[Question], setting: Setting) -> Finding:
    """Score the same right answers three times: the rewards must be equal."""
    calls = [(q, text) for q in questions[:4] if q.gold is not None for text in setting.placed(q.gold)]
    outcomes = [caller.rewards(calls) for _ in range(3)]
    differ = [
        trials[0][1]
        for trials in zip(*outcomes, strict=False)
        if len({outcome for *_, outcome in trials if isinstance(outcome, float)}) > 1
    ]
    return counted("the same answer, three times", "equal", len(calls), differ, "pays more")


def try_formats(scale: Scale) -> Finding:
    """Compare wrong answers over formats: none may add more than a right answer does."""
    shares = {name: scale.share(reward) for name, reward in scale.wrong.items() if scale.formats}
    lowest = min(shares.values(), default=0.0)
    paid = [name for name, share in shares.items() if share - lowest > 1 + ROUNDING]
    return counted("format of a wrong answer", "wrong", len(shares), paid, "pays")


def counted(kind: str, expected: str, tried: int, texts: Sequence[str], verdict: str) -> Finding:
    """Return a finding of which each text is a problem."""
    example = min(texts, key=len, default="")
    return Finding(kind, expected, tried, len(texts), 0, 0, None, verdict if texts else "ok", example)


def verdict_of(scale: Scale, golds: tuple[str, ...], findings: Sequence[Finding]) -> tuple[str, str]:
    """Return "problem", "sound" or "unknown", and a sentence."""
    problems = [finding for finding in findings if finding.is_problem]
    if golds and not scale.formats and scale.failures:
        return "problem", f"it fails for right or wrong answers: {scale.failures[0]}"
    if golds and not scale.formats:
        values = {*scale.right.values(), *scale.wrong.values()}
        if len(values) == 1:
            return "problem", f"it returns {values.pop():g} for right and for wrong answers in every format"
        return "problem", "it pays a right answer no more than a wrong one in any format that was tried"
    if any(finding.verdict == "pays" for finding in problems):
        names = [finding.kind for finding in problems if finding.verdict == "pays"]
        return "problem", f"it pays wrong answers of these kinds: {'; '.join(names)}"
    if problems:
        return "problem", "; ".join(f"{PROBLEMS[finding.verdict]}: {finding.kind}" for finding in problems)
    if not golds:
        return "unknown", "no row has an expected answer, so what right answers are paid is not known"
    return "sound", "it pays for right answers and for no wrong one that was tried"


PROBLEMS = {"pays more": "it pays more or otherwise", "fails": "it fails or is stuck"}


def notes_of(scale: Scale, golds: tuple[str, ...], questions: Sequence[Question]) -> tuple[str, ...]:
    """Return what is no problem and worth knowing."""
    notes = []
    if scale.formats and (unpaid := [name for name in FORMATS if name not in scale.formats]):
        notes.append(f"a right answer is not paid as: {', '.join(unpaid)}")
    if len(golds) < len(questions):
        notes.append(f"{len(questions) - len(golds)} of {len(questions)} rows have no expected answer")
    if scale.failures and scale.right:
        notes.append(f"{len(scale.failures)} right or wrong answers failed: {scale.failures[0]}")
    return tuple(notes)

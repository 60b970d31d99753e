"""The answer of `why`: a verdict, a place, a cause, and what holds them up."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from replayer.compare.stages import StageDifference
from replayer.diff import Excerpt

Verdict = Literal["identical", "same weights, other numbers", "diverged", "not comparable"]
Kind = Literal["config", "code", "environment", "data", "engine", "nondeterminism", "unknown"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Cause:
    """What made the records differ: `what` is a clause that follows "because".

    `file`, `line` and `commit` are None where they are not known.
    """

    kind: Kind
    what: str
    file: str | None = None
    line: int | None = None
    commit: str | None = None


UNKNOWN = Cause("unknown", "nothing that the records hold explains it")


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence: sentences, what would refute it, and the next command.

    `layer` is the first module with another output, if the two runs were traced. `distance` is 0 for
    what acts directly where the records differ, `settings` the options of B that a replay can take.
    """

    cause: Cause
    confidence: Confidence
    evidence: tuple[str, ...]
    refuted_by: str
    next: str
    layer: str | None = None
    distance: int = 0
    settings: tuple[str, ...] = ()

    def sure(self, confidence: Confidence, *sentences: str) -> "Finding":
        """Return a possible cause as the answer, with further evidence."""
        return replace(self, confidence=confidence).with_evidence(*sentences)

    def with_evidence(self, *sentences: str) -> "Finding":
        return replace(self, evidence=(*self.evidence, *sentences))


@dataclass(frozen=True)
class Setting:
    """Something that is not the same in A and B, and whether it can act where they differ.

    `section` is "config", "model", "code" or "environment". `is_outside`: `where` is a phrase that
    has both values in it.
    """

    section: str
    where: str
    left: Any
    right: Any
    acts: bool
    why: str
    is_outside: bool = False


@dataclass(frozen=True)
class WhyReport:
    """The answer. `difference` is None, and with it every fact about it, if nothing differs.

    Attributes:
        step: the step of `difference`. diverged_at: the first common step after which the weights
            differ, None if they never do or it is not recorded.
        pattern, pattern_detail, pattern_value: the kind of difference, a phrase, its number.
        settings: everything that is not the same, the cause first.
        equal: what is the same before the difference, in the order of computation.
        also: further differences that do not follow from this one, a sentence each.
        text: the tokens around the place, in A and in B.
        look: the command that shows the place in a page, None if it is not in a row.
    """

    left: str
    right: str
    verdict: Verdict
    reason: str
    num_compared: int
    num_shared: int
    finding: Finding | None = None
    step: int | None = None
    difference: StageDifference | None = None
    diverged_at: int | None = None
    pattern: str | None = None
    pattern_detail: str | None = None
    pattern_value: float | None = None
    settings: tuple[Setting, ...] = ()
    also: tuple[str, ...] = ()
    not_known: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    text: tuple[Excerpt, Excerpt] | None = None
    look: str | None = None

    @property
    def exit_code(self) -> int:
        """0 identical, 1 a difference, 2 not comparable."""
        return {"identical": 0, "not comparable": 2}.get(self.verdict, 1)

    @property
    def sentence(self) -> str:
        """The verdict, the place and the cause in one sentence."""
        if self.difference is None or self.finding is None:
            return f"{self.verdict.capitalize()}: {self.reason}."
        cause = self.finding.cause
        place = place_of(self.step, self.difference)
        how = f" ({self.pattern_detail})" if self.pattern_detail else inputs_of(self.difference)
        likely = {"high": "", "medium": " probably", "low": " perhaps"}[self.finding.confidence]
        if cause.kind == "unknown":
            return f"{self.verdict.capitalize()}: {place}{how}; why is not known: {cause.what}."
        return f"{self.verdict.capitalize()}: {place}{how},{likely} because {cause.what}."

    def to_dict(self) -> dict[str, Any]:
        """JSON types: the documented keys first, `docs/verbs/why.md`."""
        first, finding = self.difference, self.finding
        place = None if first is None else first.place
        documented = {
            "verdict": self.verdict,
            "step": self.step,
            "stage": first and first.stage,
            "tensor": first and first.name,
            "row": place and place.row,
            "token": place and place.token,
            "pattern": self.pattern,
            "cause": finding and asdict(finding.cause),
            "confidence": finding and finding.confidence,
            "next": finding and finding.next,
            "sentence": self.sentence,
            "evidence": [] if finding is None else list(finding.evidence),
            "refuted_by": finding and finding.refuted_by,
            "rank": place and place.rank,
            "prompt": place and place.prompt_id,
            "sample": place and place.sample_id,
            "minibatch": first and first.minibatch,
            "values": None if first is None else [first.left, first.right],
            "num_different": first and first.num_different,
            "num_elements": first and first.num_compared,
            "largest": first and first.largest,
            "layer": finding and finding.layer,
        }
        others = asdict(self)
        for name in (*documented, "difference", "finding", "reason"):
            others.pop(name, None)
        return documented | others


def inputs_of(first: StageDifference) -> str:
    """Return the pictures or tool results that differ, in parentheses; "" for anything else."""
    if first.name not in ("images", "tool result"):
        return ""
    return f" ({first.left or 'none'} in A, {first.right or 'none'} in B)"


def place_of(step: int | None, first: StageDifference) -> str:
    """Describe where a difference is: tensor, token, row and step, and how much of it differs."""
    words = [first.name]
    place = first.place
    if place is not None and place.token is not None:
        words.append(f"at token {place.token}")
    if place is not None:
        words.append(f"of prompt {place.prompt_id}, sample {place.sample_id}")
    elif first.minibatch is not None:
        words.append(f"in minibatch {first.minibatch}")
    return f"{' '.join(words)} differs first, in step {step}, stage {first.stage}"

"""The report of a check as one JSON document: gates on its metrics, worst tokens, token ranks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from consistency.check import Checked
from consistency.engines import Top
from consistency.errors import UnknownGate
from consistency.measure import ALIASES, worst_tokens
from consistency.score import Scores
from consistency.tokens import TokenTable

# Nats between the model's first and second token above which another first token is not a near tie.
CLEAR_NATS = 0.5

EXIT_CODES = {"healthy": 0, "mismatch": 1, "unknown": 2}


@dataclass(frozen=True)
class Gate:
    """A metric and the upper limit of its absolute value."""

    metric: str
    limit: float
    value: float

    @property
    def holds(self) -> bool:
        """True if the value is within the limit; NaN never is."""
        return abs(self.value) <= self.limit


@dataclass(frozen=True)
class WorstToken:
    """A token with a large |D|. `before` are the preceding ids.

    `top` and `engine_top` are the most likely tokens (id, logprob) of model and engine; the latter
    is empty if the engine did not report them.
    """

    sequence: int
    position: int
    token_id: int
    engine: float
    trainer: float
    rank: int
    before: tuple[int, ...]
    top: Top
    engine_top: Top


@dataclass(frozen=True)
class Ranking:
    """Ranks over the `num_tokens` tokens that the model scored in detail.

    `argmax_share` is the share of sampled tokens that are the model's most likely; `highest_rank`,
    `most_mass_before` and `least_relative` (probability relative to the most likely token) identify
    top-k, top-p and min-p. The rest is None unless the engine reported its most likely tokens: the
    share of tokens whose first choice differs, the same where the model's choice is clear, and the
    mean Jaccard index of both sides' tokens.
    """

    num_tokens: int
    argmax_share: float
    highest_rank: int
    most_mass_before: float
    least_relative: float
    argmax_mismatch: float | None = None
    clear_mismatch: float | None = None
    jaccard: float | None = None


def document(checked: Checked, gates: tuple[Gate, ...]) -> dict[str, Any]:
    """Return the complete report as JSON-ready values; the writer handles non-finite numbers."""
    found, measured = checked.diagnosis, checked.diagnosis.measurement
    ranking = rank_tokens(checked.scores, checked.tops)
    return {
        "verdict": found.verdict,
        "causes": [asdict(cause) for cause in found.causes],
        "missing": list(found.missing),
        "notes": list(checked.notes),
        "gates": [{**asdict(gate), "holds": gate.holds} for gate in gates],
        "sign": "D = trainer - engine",
        "dtype": checked.dtype,
        "setting": asdict(checked.setting),
        "num_tokens": measured.num_tokens,
        "num_sequences": measured.num_sequences,
        "excluded": asdict(measured.excluded),
        "metrics": {
            **measured.metrics,
            "surprise_z": found.surprise if math.isfinite(found.surprise) else 0.0,
        },
        "names_elsewhere": ALIASES,
        "identities": [{**asdict(identity), "holds": identity.holds} for identity in measured.identities],
        "by": {column: [asdict(group) for group in groups] for column, groups in measured.by.items()},
        "ranking": None if ranking is None else asdict(ranking),
        "trainer_check": None if checked.trainer_check is None else asdict(checked.trainer_check),
        "rescoring": None if checked.rescoring is None else asdict(checked.rescoring),
        "histogram": [list(bar) for bar in measured.histogram],
        "worst": [asdict(token) for token in describe_worst(checked)],
    }


def exit_code(checked: Checked, gates: tuple[Gate, ...]) -> int:
    """Return 0 if healthy, 1 for a mismatch or a failed gate, 2 if inconclusive."""
    return 1 if any(not gate.holds for gate in gates) else EXIT_CODES[checked.diagnosis.verdict]


def check_gates(text: str, metrics: dict[str, float]) -> tuple[Gate, ...]:
    """Parse gates such as `mean_abs=0.02,k3=0.002` and evaluate them.

    Raises:
        UnknownGate: an entry names an unknown metric, or its limit is not a number.
    """
    return tuple(parse_gate(entry, metrics) for entry in text.split(",") if entry.strip())


def parse_gate(entry: str, metrics: dict[str, float]) -> Gate:
    name, _, limit = (part.strip() for part in entry.partition("="))
    if name not in metrics:
        raise UnknownGate(
            f"gate {entry.strip()!r}: there is no metric {name!r}; the metrics are {', '.join(sorted(metrics))}"
        )
    try:
        return Gate(name, float(limit), metrics[name])
    except ValueError as error:
        raise UnknownGate(f"gate {entry.strip()!r}: {limit!r} is not a number; write {name}=0.02") from error


def describe_worst(checked: Checked, count: int = 10, num_before: int = 12) -> tuple[WorstToken, ...]:
    """Return the tokens with the largest |D| in their context."""
    table: TokenTable = checked.diagnosis.table
    found = []
    for row in worst_tokens(table, count):
        index, sequence, position = int(table.index[row]), int(table.sequence[row]), int(table.position[row])
        ids = checked.sequences.input_ids[checked.sequences.row(sequence)]
        top = zip(
            checked.scores.top_ids[index].tolist(), checked.scores.top_logprobs[index].tolist(), strict=True
        )
        found.append(
            WorstToken(
                sequence,
                position,
                int(table.token_id[row]),
                float(table.engine[row]),
                float(table.trainer[row]),
                int(checked.scores.rank[index]),
                tuple(ids[max(0, position - num_before) : position].tolist()),
                tuple(top),
                () if checked.tops is None else checked.tops[index],
            )
        )
    return tuple(found)


def rank_tokens(scores: Scores, tops: Sequence[Top] | None) -> Ranking | None:
    detailed = np.flatnonzero((scores.rank >= 0) & np.isfinite(scores.logprob))
    if not len(detailed):
        return None
    comparison = {} if tops is None else compare_tops(scores, detailed.tolist(), tops)
    return Ranking(
        num_tokens=len(detailed),
        argmax_share=float((scores.rank[detailed] == 0).mean()),
        highest_rank=int(scores.rank[detailed].max()),
        most_mass_before=float(scores.mass_before[detailed].max()),
        least_relative=float(np.exp((scores.logprob - scores.largest)[detailed].min())),
        **comparison,
    )


def compare_tops(scores: Scores, detailed: Sequence[int], tops: Sequence[Top]) -> dict[str, float]:
    compared = [index for index in detailed if tops[index]]
    if not compared:
        return {}
    differs = np.array([most_likely(tops[index]) != scores.top_ids[index, 0] for index in compared])
    gap = scores.top_logprobs[compared, 0] - scores.top_logprobs[compared, 1]
    clear = gap > CLEAR_NATS
    return {
        "argmax_mismatch": float(differs.mean()),
        "clear_mismatch": float(differs[clear].mean()) if clear.any() else 0.0,
        "jaccard": float(
            np.mean([overlap({i for i, _ in tops[at]}, set(scores.top_ids[at].tolist())) for at in compared])
        ),
    }


def most_likely(top: Top) -> int:
    """Return the id of the largest logprob."""
    return max(top, key=lambda pair: pair[1])[0]


def overlap(left: set[int], right: set[int]) -> float:
    return len(left & right) / len(left | right)

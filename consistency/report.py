"""The facts of a check as one document, and gates on its numbers."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from consistency.check import Checked
from consistency.engine.reply import Top
from consistency.errors import UnknownGate
from consistency.measure import ALIASES, worst_tokens
from consistency.ranking import rank_tokens
from consistency.tokens import TokenTable

EXIT_CODES = {"healthy": 0, "mismatch": 1, "unknown": 2}


@dataclass(frozen=True)
class Gate:
    """A metric, and the most that its absolute value may be."""

    metric: str
    limit: float
    value: float

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit; one that is no number is not."""
        return abs(self.value) <= self.limit


def check_gates(text: str, metrics: dict[str, float]) -> tuple[Gate, ...]:
    """Gates from `mean_abs=0.02,k3=0.002`.

    Raises:
        UnknownGate: an entry names no metric, or no number.
    """
    return tuple(parse_gate(entry, metrics) for entry in text.split(",") if entry.strip())


def parse_gate(entry: str, metrics: dict[str, float]) -> Gate:
    """One gate from `k3=0.002`."""
    name, _, limit = (part.strip() for part in entry.partition("="))
    if name not in metrics:
        raise UnknownGate(
            f"gate {entry.strip()!r}: no metric is called {name!r}; there are {', '.join(sorted(metrics))}"
        )
    try:
        return Gate(name, float(limit), metrics[name])
    except ValueError as error:
        raise UnknownGate(f"gate {entry.strip()!r}: {limit!r} is no number; write {name}=0.02") from error


def exit_code(checked: Checked, gates: tuple[Gate, ...]) -> int:
    """0 healthy, 1 mismatch or a gate that does not hold, 2 cannot tell."""
    return 1 if any(not gate.holds for gate in gates) else EXIT_CODES[checked.diagnosis.verdict]


@dataclass(frozen=True)
class WorstToken:
    """A token that the two sides disagree about. `before` are the ids in front of it.

    `top` and `engine_top` are either side's likeliest tokens (id, logprob), the engine's empty where it did not tell.
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


def describe_worst(checked: Checked, count: int = 10, num_before: int = 12) -> tuple[WorstToken, ...]:
    """The tokens with the largest |D|, in their context."""
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


def document(checked: Checked, gates: tuple[Gate, ...]) -> dict[str, Any]:
    """Everything as JSON-ready values; non-finite numbers are left to the writer."""
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
        "third": None if checked.third is None else asdict(checked.third),
        "rescoring": None if checked.rescoring is None else asdict(checked.rescoring),
        "histogram": [list(bar) for bar in measured.histogram],
        "worst": [asdict(token) for token in describe_worst(checked)],
    }

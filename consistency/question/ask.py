"""Find the engine at fault where two records differ though weights, seed and prompts are equal.

    each side:  tokens ─> prompts equal? ─> log-probs under the weights of each token's version
                 ─> of versions before, of the base model, with some tensors of before?  stale_tensors
                 ─> of another temperature, truncation, penalty?                         sampling_laws
                 ─> tokens that the recorded seed draws (embedded engine)?
                 ─> any other cause that `check` knows
    both sides: one has a cause ─> that side │ none ─> neither, the tokens differ by chance

A side is accused only for what its own log-probs and tokens show; that the other side differs is no
evidence against it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from consistency.question.sampling_laws import DRAWN_AGAIN
from consistency.question.side import CONFIDENCES, Confidence, Examined, Kind, by_tokens, examine
from recorder import Record


@dataclass(frozen=True)
class EngineAnswer:
    """Which engine is at fault: A (left), B (right), both, or None as far as is seen.

    `kind` is a class of causes, `cause` says it in words; `evidence` holds one sentence each.
    """

    side: Literal["A", "B", "both"] | None
    kind: Kind
    cause: str
    confidence: Confidence
    evidence: tuple[str, ...]


def ask_engine(left: Record, right: Record, step: int, models: Mapping[str, Path]) -> EngineAnswer:
    """Decide whose engine explains that two records sampled differently in a step.

    Args:
        models: checkpoints by version of the weights ("7" are those that step 7 of a run from 0
            trains, and that should sample for it), and "base", the model without its adapter.
            Versions before are compared as far as they are given.

    Raises:
        NothingToCompare: a record has no sampled tokens, or no weights of their version are given.
        ModelError, RecordError: a checkpoint or step cannot be read.
    """
    other_prompts = compare_prompts(left, right, step)
    if other_prompts is not None:
        return other_prompts
    return decide(examine(left, step, models), examine(right, step, models))


def decide(left: Examined, right: Examined) -> EngineAnswer:
    facts = (f"A: {left.facts}", f"B: {right.facts}")
    one, other = left.suspect, right.suspect
    if one is not None and other is not None:
        if (one.kind, one.cause) == (other.kind, other.cause):
            cause = f"{one.cause}, in both engines alike: it does not explain their difference"
            return EngineAnswer(
                "both", one.kind, cause, "low", (f"A: {one.evidence}", f"B: {other.evidence}")
            )
        cause = f"A: {one.cause}; B: {other.cause}"
        kind = one.kind if one.kind == other.kind else "other"
        weaker = min(one.confidence, other.confidence, key=CONFIDENCES.index)
        return EngineAnswer("both", kind, cause, weaker, (f"A: {one.evidence}", f"B: {other.evidence}"))
    if one is not None:
        return EngineAnswer("A", one.kind, one.cause, one.confidence, (f"A: {one.evidence}", facts[1]))
    if other is not None:
        return EngineAnswer(
            "B", other.kind, other.cause, other.confidence, (f"B: {other.evidence}", facts[0])
        )
    confidence = by_tokens(min(left.num_tokens, right.num_tokens))
    by_seed = [side.redrawn is not None and side.redrawn < DRAWN_AGAIN for side in (left, right)]
    if left.redrawn is not None and right.redrawn is not None and any(by_seed):
        side: Literal["A", "B", "both"] = "both" if all(by_seed) else "A" if by_seed[0] else "B"
        cause = (
            "the tokens are not those that the recorded seed draws: another seed, or other names of the rows"
        )
        return EngineAnswer(side, "seed", cause, confidence, facts)
    cause = "neither engine is at fault as far as is seen: the samples differ by seed, order or rounding"
    return EngineAnswer(None, "none", cause, confidence, facts)


def compare_prompts(left: Record, right: Record, step: int) -> EngineAnswer | None:
    """Answer if rows of the same name have prompts of other tokens."""
    prompts = [prompts_by_name(record, step) for record in (left, right)]
    shared = prompts[0].keys() & prompts[1].keys()
    other = [name for name in sorted(shared) if prompts[0][name] != prompts[1][name]]
    if not other:
        return None
    evidence = [
        f"{len(other)} of {len(shared)} prompts have other tokens, the first is that of prompt {other[0][0]}"
    ]
    changed = []
    for side, record in (("A", left), ("B", right)):
        tokenizer = (record.header.tokenizer or {"files": {}})["files"]
        model = record.header.model["files"]
        files = [name for name in tokenizer if name in model and tokenizer[name] != model[name]]
        if files:
            changed.append(side)
            evidence.append(f"{side}: {', '.join(files)} of the tokenizer are not those of the model")
    files = files_that_differ(left, right)
    if not files:
        cause = (
            "the prompts have other tokens though the tokenizers' files are equal: other data, or other code"
        )
        return EngineAnswer(None, "tokenizer", cause, "medium", tuple(evidence))
    what = "chat template" if all("template" in name for name in files) else "tokenizer"
    evidence.append(f"{', '.join(files)} differ between A and B")
    at_fault: Literal["A", "B"] | None = ("A" if "A" in changed else "B") if len(changed) == 1 else None
    return EngineAnswer(
        at_fault, "tokenizer", f"another {what}", "high" if at_fault else "medium", tuple(evidence)
    )


def files_that_differ(left: Record, right: Record) -> list[str]:
    one, other = ((record.header.tokenizer or {"files": {}})["files"] for record in (left, right))
    return sorted(
        name
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name) and ("token" in name or "template" in name or "vocab" in name)
    )


def prompts_by_name(record: Record, step: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the tokens before the first sampled one of each row, by prompt and sample."""
    found = {}
    recorded = record.step(step)
    for rank in range(recorded.manifest.num_ranks):
        batch = recorded.batch(rank, ("cu_seqlens", "input_ids", "loss_mask", "prompt_id", "sample_id"))
        bounds = batch["cu_seqlens"]
        for row, name in enumerate(
            zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)
        ):
            mask = batch["loss_mask"][bounds[row] : bounds[row + 1]]
            end = bounds[row] + (int(mask.argmax()) if mask.any() else len(mask))
            found[name] = tuple(batch["input_ids"][bounds[row] : end].tolist())
    return found

"""Correct logprobs attributed to the wrong tokens: positions, rows, spans, contexts."""

import itertools

import numpy as np

from consistency.case import BAD_RATIO, Case, Finding
from consistency.causes.definition import confidence, explained, replay_evidence
from consistency.shape import breaks, means_by, run_lengths, trend

MIN_RUN = 3  # tokens; a shorter run can be chance
COPIED_NATS = 12.0  # once in 160,000 checks by chance


def duplicate_samples(case: Case) -> Finding | None:
    """R10: the samples of a prompt are copies of each other: one seed for all of them."""
    sequences = case.sequences
    if sequences.prompt_id is None or case.setting.greedy:
        return None
    shared, num_pairs = longest_shared(case)
    # A pair shares so many nats by chance once in exp(nats); of several pairs, one may.
    copies = [nats for nats in shared if nats - np.log(num_pairs) > COPIED_NATS]
    if not copies:
        return None
    greedy = float(np.mean(case.scores.rank[case.scores.rank >= 0] == 0)) > 0.98
    return Finding(
        "R10",
        "samples of a prompt are copies",
        0.85 if greedy else 0.95,  # greedy decoding copies as well, and is then the cause
        f"{len(copies)} of {num_pairs} pairs of samples of one prompt begin with the same tokens, of up to {max(copies):.0f} nats: "
        f"by chance, the likeliest of them happens once in e^{min(copies) - np.log(num_pairs):.0f}",
        "sample twice with different seeds: the completions must differ",
        "a seed per sample (SGLang sampling_params.sampling_seed; on-policy and deterministic modes use 42 for all)",
    )


def longest_shared(case: Case) -> tuple[list[float], int]:
    """Return the nats of the common beginning of each pair of samples of one prompt, and the pairs.

    A sample is compared with the next one of its prompt in the order of their tokens, which is the
    one that it shares most with.
    """
    sequences = case.sequences
    assert sequences.prompt_id is not None
    nats = np.zeros(len(sequences.input_ids))
    # The smaller one: the trainer's is far too large where it scores after another prompt.
    surprisals = -case.scores.logprob, -sequences.engine_logprobs[sequences.scored]
    nats[sequences.scored] = np.clip(np.nan_to_num(np.minimum(*surprisals)), 0.0, None)
    groups: dict[tuple[int, bytes], list[tuple[list[int], list[float]]]] = {}
    for row in range(sequences.num_rows):
        tokens = sequences.row(row)
        ids, sampled = sequences.input_ids[tokens], sequences.sampled[tokens]
        if not sampled.any():
            continue
        first = int(np.argmax(sampled))
        key = (int(sequences.prompt_id[row]), ids[:first].tobytes())
        groups.setdefault(key, []).append((ids[sampled].tolist(), nats[tokens][sampled].tolist()))
    shared = []
    for samples in groups.values():
        for (one, own), (other, _) in itertools.pairwise(sorted(samples)):
            equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            shared.append(float(sum(own[: min(len(one), len(other)) if equal is None else equal])))
    return shared, sum(len(samples) * (len(samples) - 1) // 2 for samples in groups.values())


def shifted_logprobs(case: Case) -> Finding | None:
    """R11: each logprob belongs to a neighbouring token."""
    found = explained(case, "R11")
    if found is None:
        return None
    return Finding(
        "R11",
        "logprobs shifted against their tokens",
        confidence(found),
        f"the engine's logprob at a token is the trainer's at offset {found.prediction.parameter:+.0f}; {replay_evidence(found)}",
        "shift back: the difference must fall to noise",
        "logits at position t predict token t + 1: logits[:-1] with ids[1:]; roll mask, logprobs and versions together",
    )


def rows_mixed_up(case: Case) -> Finding | None:
    found = explained(case, "R12")
    if found is None:
        return None
    return Finding(
        "R12",
        "rows paired with other rows' logprobs",
        confidence(found),
        (
            f"{found.prediction.parameter:.0%} of the rows fit another row's scores"
            if found.prediction.parameter
            else f"{found.prediction.name} explain the logprobs"
        )
        + f"; {replay_evidence(found)}",
        "pair each row with the best fit: the difference must fall to noise",
        "carry an id with each request through dispatch, sorting and splitting over ranks",
    )


def context_rewritten_at_a_turn(case: Case) -> Finding | None:
    """R14: from some turn on, the engine saw another history than the recorded one."""
    turn, size = case.table.turn, np.abs(case.table.difference)
    if not case.unexplained or turn.max() == 0:
        return None
    names, means, _ = means_by(turn, size)
    bad = means > BAD_RATIO * max(means[0], case.level / 2)
    if bad[0] or not bad[1:].any():
        return None
    first = int(names[np.argmax(bad)])
    return Finding(
        "R14",
        "history rewritten between turns",
        0.85,
        f"mean |D| by turn: {', '.join(f'{m:.2g}' for m in means[:6])}; it jumps at turn {first}",
        "the prompt of each turn must begin with the tokens of the previous turn",
        "append tokens instead of rendering the conversation again; keep reasoning in the history (chat templates strip it)",
    )


def retokenised(case: Case) -> Finding | None:
    """R13: from some position on, the ids are not those that the engine sampled."""
    if not case.unexplained or case.table.turn.max() > 0:
        return None
    found = breaks(case.table)
    bad = found.mean > case.level
    broken = (
        bad
        & (found.before < 2 * case.level)
        & (found.after_median > case.level)
        & (found.after > BAD_RATIO * np.maximum(found.before, case.level / 2))
    )
    if bad.sum() < 3 or broken.sum() < 0.6 * bad.sum() or np.ptp(found.place[broken]) < 8:
        return None
    if case.table.version is not None and len(np.unique(case.table.version)) > 1:
        return None  # an update in flight looks the same
    return Finding(
        "R13",
        "completions re-tokenised",
        0.7,
        f"{broken.sum()} of {bad.sum()} bad sequences are clean up to some position, different in each "
        f"({found.before[broken].mean():.2g}), and bad after it ({found.after[broken].mean():.2g})",
        "decode and encode the ids: the result must be equal; compare it with the ids that the engine returned",
        "keep the engine's ids (SGLang output_ids, vLLM return_token_ids); never encode decoded text",
    )


def bos(case: Case) -> Finding | None:
    """R15: the engine's prompt has one BOS more, or one less."""
    found = explained(case, "R15")
    if found is None:
        return None
    return Finding(
        "R15",
        found.prediction.name,
        confidence(found),
        f"scoring with that prompt explains the engine's logprobs: {replay_evidence(found)}",
        "the engine's prompt_tokens must equal the number of ids in the record",
        "send input_ids instead of text, or add_special_tokens false where the template already holds BOS",
    )


def other_context(case: Case) -> Finding | None:
    """R16: the engine saw another prompt (such as chat template); |D| fades with position."""
    if not case.unexplained:
        return None
    shape = trend(case.table.turn_position, np.minimum(np.abs(case.table.difference), 5.0))
    if (
        shape is None
        or shape.line < 0.5
        or shape.first < 1.5 * shape.last
        or shape.first < BAD_RATIO * case.level
    ):
        return None
    return Finding(
        "R16",
        "engine and trainer saw different prompts",
        0.6,
        f"|D| is largest at the first sampled tokens and fades: {shape.first:.2g} in the first quarter, {shape.last:.2g} in the last",
        "compare the ids of the prompt on both sides",
        "render the chat template once and send input_ids; check system prompt, generation prompt and BOS",
    )


def lengths_differ(case: Case) -> Finding | None:
    """R17: replies with more or fewer logprobs than ids."""
    differences = case.sequences.length_differences
    if not differences:
        return None
    at_the_end = all(abs(d) == 1 for d in differences)
    return Finding(
        "R17",
        "EOS without its logprob, or a logprob without its token"
        if at_the_end
        else "logprobs and ids differ in number",
        0.9,
        f"{len(differences)} replies were excluded: logprobs minus ids are {sorted(set(differences))[:5]}",
        "compare the lengths of both lists of one reply",
        "SGLang: no_stop_trim true, and both from output_token_logprobs; on chat routes logprobs cover reasoning as well",
    )


def foreign_tokens(case: Case) -> Finding | None:
    """R18: spans that the model did not sample (tool output, environment) are in the loss mask."""
    table = case.table
    zero = (table.engine == 0.0) & (table.trainer < -0.05)
    runs = run_lengths(zero, table.sequence)
    long = runs[runs >= MIN_RUN]
    if not len(long):
        return None
    return Finding(
        "R18",
        "tokens in the loss mask that the model did not sample",
        0.95,
        f"{len(long)} spans of up to {long.max()} tokens have logprob exactly 0, the trainer's mean is {table.trainer[zero].mean():.2g}",
        "inspect the spans: they must be generated by the model",
        "set loss_mask 0 on tool output and environment text",
    )


CAUSES = (
    lengths_differ,
    foreign_tokens,
    duplicate_samples,
    shifted_logprobs,
    rows_mixed_up,
    bos,
    context_rewritten_at_a_turn,
    retokenised,
    other_context,
)

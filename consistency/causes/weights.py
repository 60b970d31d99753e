"""The engine computes correctly, with other weights than the trainer's."""

import math

import numpy as np

from consistency.candidates.tensors import EVERY, TOWER
from consistency.case import BAD_RATIO, Case, Finding
from consistency.causes.definition import confidence, explained, replay_evidence
from consistency.shape import breaks, explained_by_key, means_by
from consistency.tokens import Bools, TokenTable

LARGEST_CHANCE = 0.05
SURE_MARGIN = 40.0  # nats over the next tensor
UNRELATED_CONFIDENCE = 0.5  # below R33: where nothing is alike, the token id explains much of D, too
VISION_WORDS = (".visual.", "vision_tower", "multi_modal_projector")


def stale_weights(case: Case) -> Finding | None:
    """R24: the engine's logprobs are those of an earlier checkpoint."""
    found = explained(case, "R24")
    if found is None:
        return None
    return Finding(
        "R24",
        "stale weights in the engine",
        confidence(found),
        f"the previous checkpoint explains the engine's logprobs: {replay_evidence(found)}",
        "compare a checksum of the engine's weights with the trainer's",
        "wait for the weight update before sampling; "
        "check the reply of /update_weights_from_distributed and the weight_version of each reply",
    )


def partly_stale(case: Case) -> Finding | None:
    """R25: one module of the engine still holds weights of the previous checkpoint."""
    found = explained(case, "R25")
    if found is None:
        return None
    return Finding(
        "R25",
        f"{found.prediction.name} was not updated in the engine",
        confidence(found),
        f"the model with {found.prediction.name} of the previous checkpoint explains the engine's logprobs: {replay_evidence(found)}",
        "compare checksums tensor by tensor (rollout.verify_weights_every: 1): those of this module must differ",
        "look for names that the engine's loader skips; load strictly and count the loaded tensors",
    )


def one_tensor_differs(case: Case) -> Finding | None:
    """R24, R25, R26, R65: the change of one tensor, or of all, explains which tokens differ."""
    found = case.changed_tensor
    if found is None or case.explanation is not None:
        return None
    evidence = (
        f"{found.name} {found.how} leaves {found.noise:.0%} of the difference"
        if found.how is not None
        else f"a change of {found.name} explains which tokens differ, and leaves {found.noise:.0%} of the difference as noise"
    )
    is_vision = found.name == TOWER or any(word in found.name for word in VISION_WORDS)
    most = 0.6 if found.name == EVERY else 0.95 if found.how is not None else 0.9
    is_vocabulary = "embed" in found.name or "lm_head" in found.name or "wte" in found.name
    return Finding(
        "R24" if found.name == EVERY else "R65" if is_vision else "R26" if is_vocabulary else "R25",
        "many tensors differ in the engine (stale weights, or another detail of the model)"
        if found.name == EVERY
        else f"{found.name} differs in the engine"
        + (f": it is {found.how}" if found.how is not None else ""),
        min(0.6 + 0.3 * found.margin / SURE_MARGIN, most),
        f"{evidence}: {found.nats:.0f} nats likelier than noise alone, {found.margin:.0f} nats than the next tensor",
        "compare checksums of this tensor on both sides (rollout.verify_weights_every: 1)",
        "look for names that the engine's loader skips; give the previous checkpoint (--previous) to see whether it is stale",
    )


def adapter_not_loaded(case: Case) -> Finding | None:
    """R32: the engine samples from the base model."""
    found = explained(case, "R32")
    if found is None:
        return None
    return Finding(
        "R32",
        "adapter not loaded in the engine",
        confidence(found),
        f"the base model explains the engine's logprobs: {replay_evidence(found)}",
        "query the engine with and without the adapter: the logprobs must differ",
        "send lora_path, or merge in float32 with alpha / r (alpha / sqrt(r) for rsLoRA) before the weight update",
    )


def token_bias(case: Case) -> Finding | None:
    """R26, R27, R55: D depends on the token id: output bias or rows of the output layer differ."""
    if not case.unexplained:
        return None
    difference = np.clip(case.table.difference, -5.0, 5.0)
    explains = explained_by_key(case.table.token_id, difference)
    if explains < 0.6:
        return None
    names, means, count = means_by(case.table.token_id, np.abs(difference))
    bad = names[(means > BAD_RATIO * max(float(np.median(means)), case.level)) & (count >= 2)]
    share_of_bad = (difference[np.isin(case.table.token_id, bad)] ** 2).sum() / (difference**2).sum()
    few = 0 < len(bad) <= 0.1 * len(names) and share_of_bad > 0.6
    listed = ", ".join(map(str, bad[:8].tolist()))
    added = few and set(bad.tolist()) <= case.setting.added_token_ids
    return Finding(
        "R55" if added else "R26" if few else "R27",
        "rows of added tokens differ"
        if added
        else "some rows of embedding or output layer differ"
        if few
        else "output bias missing on one side",
        UNRELATED_CONFIDENCE if not few and are_unrelated(case) else 0.8,
        f"the token id alone explains {explains:.0%} of the variance of D"
        + (f"; {len(bad)} ids stand out: {listed}" if few else ""),
        "compare norms of the rows of lm_head on both sides",
        "tie or sync lm_head again, resize embeddings equally" if few else "load lm_head.bias on both sides",
    )


def cache_kept_over_update(case: Case) -> Finding | None:
    """R29: requests that reused cached keys and values are bad, fresh ones are not."""
    cached = case.table.cached_tokens
    if not case.unexplained or cached is None or len(np.unique(cached > 0)) < 2:
        return None
    size = np.abs(case.table.difference)
    fresh, reused = float(size[cached == 0].mean()), float(size[cached > 0].mean())
    limit = BAD_RATIO * max(fresh, case.level / 2)
    if reused < limit or chance_of_sound(case.table, cached == 0, limit) > LARGEST_CHANCE:
        return None
    return Finding(
        "R29",
        "prefix cache kept over a weight update",
        0.9,
        f"mean |D| {reused:.2g} with a prefix from the cache, {fresh:.2g} without",
        "flush the cache and sample again: the difference must vanish",
        "SGLang /flush_cache after each weight update (it refuses while requests run) or extra_key per version; vLLM reset_prefix_cache",
    )


def chance_of_sound(table: TokenTable, fresh: Bools, limit: float) -> float:
    """Return how likely no row of those with `fresh` tokens is bad if bad rows are drawn.

    One fresh row of many is sound by chance where half of all rows are.
    """
    rows, means, _ = means_by(table.sequence, np.abs(table.difference))
    num_fresh, num_sound = int(np.isin(rows, table.sequence[fresh]).sum()), int((means <= limit).sum())
    return math.comb(num_sound, num_fresh) / math.comb(len(rows), num_fresh)


def update_in_flight(case: Case) -> Finding | None:
    """R30: samples that span a weight update differ before or after it."""
    version = case.table.version
    if not case.unexplained or version is None or len(np.unique(version)) < 2:
        return None
    mixed = np.isin(
        case.table.sequence,
        case.table.sequence[np.flatnonzero((np.diff(version) != 0) & (np.diff(case.table.sequence) == 0))],
    )
    if not mixed.any():
        return None
    names, means, _ = means_by(version[mixed], np.abs(case.table.difference[mixed]))
    if means.max() < BAD_RATIO * max(float(means.min()), case.level / 2):
        return None
    listed = ", ".join(f"{name}: {mean:.2g}" for name, mean in zip(names, means, strict=True))
    return Finding(
        "R30",
        "samples span a weight update",
        0.85,
        f"within samples of several versions, mean |D| by version is {listed}",
        "score each token with the weights of its own version: the difference must vanish",
        "keep a version per token and correct by importance weights, or drop samples that span versions",
    )


def are_unrelated(case: Case) -> bool:
    metrics = case.measurement.metrics
    return metrics["mean_abs"] >= 1.0 and metrics["logprob_pearson"] <= 0.35


def other_checkpoint(case: Case) -> Finding | None:
    """R33: engine and trainer hold different checkpoints."""
    metrics = case.measurement.metrics
    if not case.unexplained or not are_unrelated(case):
        return None
    uniform = np.log(max(case.setting.vocabulary_size, 2))
    return Finding(
        "R33",
        "other weights: another checkpoint, or a replaced layer",
        0.6,
        f"logprobs correlate at only {metrics['logprob_pearson']:.2f}; the trainer assigns the engine's tokens "
        f"{case.table.trainer.mean():.2g} nats on average (a uniform distribution {-uniform:.2g})",
        "compare checksums of the weight files on both sides",
        "use the same folder on both sides; check that every shard of the index was loaded",
    )


def one_worker_differs(case: Case) -> Finding | None:
    """R34: some engines or sequences are bad and the others are not."""
    if not case.unexplained:
        return None
    size = np.abs(case.table.difference)
    if case.table.worker is not None:
        names, means, _ = means_by(case.table.worker, size)
        bad = means > BAD_RATIO * max(float(means.min()), case.level / 2)
        if not bad.any() or bad.all():
            return None
        return Finding(
            "R34",
            "some engines hold other weights",
            0.9,
            f"mean |D| is {means[bad].mean():.2g} on engines {names[bad].tolist()}, {means[~bad].mean():.2g} on the others",
            "score the same tokens with one of them and a good one",
            "restart these engines, and let each confirm the version after a weight update",
        )
    found = breaks(case.table)
    bad = found.mean > BAD_RATIO * case.level
    clean = found.mean < 1.5 * case.level
    if bad.sum() < 2 or clean.sum() < 2 or (bad | clean).mean() < 0.9:
        return None
    return Finding(
        "R34",
        "some sequences are bad from start to end",
        0.45,
        f"{bad.sum()} of {len(bad)} sequences have mean |D| {found.mean[bad].mean():.2g}, the others {found.mean[clean].mean():.2g}",
        "group by engine, cache and image: the bad ones must have something in common",
        "record the engine of each sequence (worker) and its cached_tokens, to distinguish a stale engine from a stale cache",
    )


def policy_moved(case: Case) -> Finding | None:
    """R57: tokens of older versions differ because the policy moved; not a fault."""
    version, now = case.table.version, case.setting.model_version
    if version is None or now is None or len(np.unique(version)) < 2 or case.mean_abs <= case.level / 2:
        return None
    lag, means, _ = means_by(now - version, np.abs(case.table.difference))
    if lag[0] != 0 or means[0] > case.level or means[1:].min() < 1.5 * means[0]:
        return None
    return Finding(
        "R57",
        "the policy moved since these tokens were sampled",
        0.8,
        f"mean |D| by version lag: {', '.join(f'{k}: {m:.2g}' for k, m in zip(lag, means, strict=True))}",
        "tokens of the trainer's own version must agree",
        "importance weights correct for it; a smaller max_head_offpolicyness reduces it",
        fault=False,
    )


CAUSES = (
    stale_weights,
    partly_stale,
    one_tensor_differs,
    adapter_not_loaded,
    policy_moved,
    cache_kept_over_update,
    update_in_flight,
    one_worker_differs,
    token_bias,
    other_checkpoint,
)

"""Find quantities by the words that a metric's name ends with, where no framework's name matches.

A name is cut into segments at `/`, and segments into words; words for a mean are left out. The
longest ending that is known names the quantity: `my_env/ppo/kl_loss/mean` ends with `kl loss`, and
not with `loss`. Other orders count where no further word remains: `loss/policy`. Words before the
ending may not change what it means (`critic`, `max`), and in the last segment only words that add
nothing are allowed: `draft_grad_norm` is none of the policy's.
"""

import re
from collections.abc import Iterable, Sequence


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


MEANS = words("mean avg average all")
EVALUATION = words("eval evaluation val valid validation test heldout dev")
NEUTRAL = words(
    "train training global batch total overall raw task final policy actor ppo grpo pg rl model token tokens"
    " step approx approximate seq sequence sample env episode outcome rollout trainer optim trajectory update"
    " stats metrics losses rlhf objective"
)
# Words before the ending that make it another quantity.
FORBIDDEN = words(
    "std var min max median p50 p90 p95 p99 quantile percentile timing time seconds ms perf system gpu cpu"
    " memory count num number sum coef coefficient target lower upper low high before after critic value"
    " values vf draft mtp aux teacher student ref reference margin margins chosen rejected baseline"
    " advantage advantages penalty prompt prompts per non rewards progress dispatcher distillation"
)
ALLOWED = {
    "reward": {"critic"},
    "reference_kl": {"ref", "reference", "critic"},
    "explained_variance": {"critic", "value"},
}
CLIPPED = {"clip_ratio": {"response", "completion", "completions", "length", "grad", "gradient", "tis", "is"}}
# Words of which the name needs one: OpenRLHF's `logprobs_diff` is policy against reference.
NEEDED = {
    "logprob_difference": words("rollout sampling inference engine generation gen vllm sglang mismatch")
}

# Endings of each quantity, the most specific reading first.
ENDINGS: dict[str, tuple[str, ...]] = {
    "reward": (
        *("reward", "rewards", "raw reward", "task reward", "reward total", "score", "scores", "return"),
        *("returns", "success rate", "solve rate", "pass rate", "pass 1", "pass at 1", "pass1"),
    ),
    "importance_weight": ("importance weight", "importance weights", "importance ratio", "probs ratio"),
    "behave_imp_weight": (
        *("behave imp weight", "behave importance weight", "rollout is", "rollout is weight", "tis"),
        *("importance sampling ratio", "sampling importance ratio", "is ratio", "is weight"),
    ),
    "clip_ratio": (
        *("clip ratio", "clipfrac", "clip frac", "clip fraction", "clipped fraction", "clipped ratio"),
        *("fraction clipped", "frac clipped"),
    ),
    "approx_kl": ("approx kl", "approxkl", "ppo kl", "kl old", "old kl"),
    "reference_kl": (
        *("kl", "kl loss", "ref kl", "reference kl", "kl ref", "kl penalty", "kl div", "kl divergence"),
        *("kl to ref", "kl to reference", "reward kl penalty"),
    ),
    "entropy": ("entropy", "entropy loss", "ent loss"),
    "grad_norm": ("grad norm", "gradient norm", "gradnorm", "grad norms", "gradients norm", "norm grad"),
    "length": (
        *("response length", "response lengths", "response len", "completion length", "completions length"),
        *(
            "output length",
            "output len",
            "generate length",
            "gen length",
            "gen len",
            "generation length",
            "generated length",
        ),
        *("seq len", "sequence length", "num output tokens", "gen tokens per sample", "rollout length"),
        *("response tokens", "completion tokens", "length response"),
    ),
    "no_eos": (
        *("no eos ratio", "no eos ratios", "no eos", "truncated ratio", "truncation rate", "truncation"),
        *("truncation ratio", "truncated fraction", "truncated rate", "truncated frac", "is truncated"),
        *("response length clip ratio", "response clip ratio", "completions clipped ratio"),
        *("completion clipped ratio", "overlong ratio", "overlong rate", "fraction truncated"),
        *("frac truncated", "clipped completions", "response clipped ratio"),
    ),
    "zero_variance_groups": (
        *("frac reward zero std", "reward zero std", "zero variance groups", "zero std ratio"),
        *("zero std fraction", "zero variance ratio", "zero variance fraction", "degenerate groups"),
        *("zero std groups", "frac zero std", "zero var group frac", "zero advantage frac"),
    ),
    "staleness": (
        "staleness",
        "off policy",
        "offpolicyness",
        "off policyness",
        "policy lag",
        "trajectory age",
    ),
    "logprob_difference": (
        *("logprob abs diff", "logprobs abs diff", "logprob diff", "logprobs diff", "logp diff"),
        *("logp difference", "logprob difference", "log probs abs diff", "log prob diff", "probs diff"),
    ),
    "k3": (
        *("k3", "k3 kl", "mismatch kl", "gen kl error", "generation kl error", "rollout kl", "vllm kl"),
        *("train rollout kl", "inference kl", "train inference kl", "kl mismatch"),
    ),
    "effective_samples": ("eff sample size", "effective sample size", "ess", "ess ratio"),
    "filtered": ("filtered fraction", "masked fraction", "filtered ratio"),
    "lr": ("lr", "learning rate"),
    "explained_variance": ("explained variance", "explained var", "vf explained var"),
    "policy_loss": ("policy loss", "pg loss", "actor loss", "policy gradient loss", "surrogate loss"),
    "loss": ("loss",),
    "preference_accuracy": (
        "reward accuracy",
        "rewards accuracies",
        "reward accuracies",
        "preference accuracy",
    ),
    "chosen_reward": ("chosen reward", "rewards chosen", "chosen rewards"),
    "rejected_reward": ("rejected reward", "rewards rejected", "rejected rewards"),
}
EVALUATED = {
    "eval_reward": (*ENDINGS["reward"], "accuracy", "acc", "correct", "exact match"),
    "eval_loss": ENDINGS["loss"],
}


def by_words(names: Iterable[str]) -> dict[str, str]:
    """Return for each quantity the name that means it, of the names that mean any."""
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for name in names:
        found = read_name(name)
        if found is not None:
            quantity, rank = found
            best[quantity] = min(best.get(quantity, (rank, name)), (rank, name), key=lambda one: one[0])
    return {quantity: name for quantity, (_, name) in best.items()}


def read_name(name: str) -> tuple[str, tuple[int, int]] | None:
    """Return the quantity that a name means, and how well it does (the lowest is best)."""
    segments = [kept for segment in re.split(r"[/|:]|\.(?=\S)", name) if (kept := words_of(segment))]
    found_words = [word for segment in segments for word in segment]
    is_evaluation = not EVALUATION.isdisjoint(found_words)
    found = [
        (len(ending.split()), ends_with(found_words, ending), quantity, rank)
        for quantity, endings in (EVALUATED if is_evaluation else ENDINGS).items()
        for rank, ending in enumerate(endings)
        if ends_with(found_words, ending) or same_words(found_words, ending)
    ]
    if not found:
        return None
    size, is_end, quantity, rank = max(found)
    before = found_words[:-size] if is_end else []
    in_leaf = segments[-1][:-size]
    forbidden = (FORBIDDEN | CLIPPED.get(quantity, set())) - ALLOWED.get(quantity, set())
    if not forbidden.isdisjoint(before) or NEEDED.get(quantity, set(found_words)).isdisjoint(found_words):
        return None
    if is_end and not is_evaluation and not (NEUTRAL | NEEDED.get(quantity, set())).issuperset(in_leaf):
        return None
    return quantity, (rank, len(found_words) - size)


def ends_with(found: Sequence[str], ending: str) -> bool:
    return list(found[-len(ending.split()) :]) == ending.split()


def same_words(found: Sequence[str], ending: str) -> bool:
    return words(ending).issubset(found) and NEUTRAL.issuperset(set(found) - words(ending))


def words_of(segment: str) -> Sequence[str]:
    spaced = re.sub(
        r"([a-z0-9])([A-Z])", r"\1 \2", segment.partition("@")[0] if "mean@" in segment else segment
    )
    return [word for word in re.findall(r"[a-z0-9]+", spaced.lower()) if word not in MEANS]

"""Options of DPO and reward models that must agree; see `checks.py`."""

from collections.abc import Iterator

from areal_core.config.experiment import DPOConfig, RWConfig


def pair_fits_into_a_micro_batch(config: DPOConfig | RWConfig) -> Iterator[str]:
    limit, longest = config.actor.mb_spec.max_tokens_per_mb, config.train_dataset.max_length
    if limit and longest and limit < 2 * longest:
        yield (
            f"actor.mb_spec.max_tokens_per_mb is {limit} and train_dataset.max_length is {longest}; "
            "a pair stays in one micro-batch: the first must be at least twice the second"
        )


def dpo_compares_with_its_reference(config: DPOConfig) -> Iterator[str]:
    actor, ref = config.actor, config.ref
    if ref is not None and not ref.path:
        yield "ref.path is empty; give a model folder, or no ref section for the initial policy"
    if ref is not None and ref.temperature != actor.temperature:
        yield f"ref.temperature is {ref.temperature} and actor.temperature is {actor.temperature}; they must be equal"
    if actor.init_from_scratch:
        yield "actor.init_from_scratch is True; the reference could not have the same weights: give a trained model"


PAIR_COUPLINGS = (pair_fits_into_a_micro_batch,)
DPO_COUPLINGS = (dpo_compares_with_its_reference,)

"""What another framework's own code computes from recorded rows, in float64.

TRL's advantages and loss are methods of GRPOTrainer; they run on a stand-in for `self` that has the
recorded rows instead of a model and a generator. verl's are functions of `core_algos`. Nothing of
either is copied. An attribute that a version needs and the stand-in lacks ends in `CannotRun`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replayer.crosscheck.options import CISPO, Options
from replayer.crosscheck.step_rows import Floats, StepRows
from replayer.crosscheck.their_configs import TABLES, as_trl, as_verl, with_none
from replayer.crosscheck.twin import LossInputs, correction, groups_of, mask_of


class CannotRun(ValueError):
    """A framework's code cannot compute this stage of this step; the message is the reason."""


def imported(module: str) -> Any:
    """Import a module of a framework.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: it is installed and does not import.
    """
    name = module.split(".")[0]
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{name} is installed and cannot be imported: {error}") from error


@contextmanager
def in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    except (AttributeError, TypeError, KeyError, NotImplementedError) as error:
        raise CannotRun(f"its code does not run on a record: {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(before)


def gradient_of(compute: Callable[[Tensor], Tensor], given: LossInputs) -> tuple[float, Tensor]:
    """Return a loss as a function of current log-probs, and its gradient."""
    with in_float64():
        current = given.current.clone().requires_grad_(True)
        loss = compute(current)
        (gradient,) = torch.autograd.grad(loss, current)
    return float(loss.detach()), gradient


class Trl:
    """GRPOTrainer of TRL; `view` is what it computes where it is given options."""

    name = "TRL"
    view = staticmethod(as_trl)

    def __init__(self) -> None:
        self.trainer = imported("trl.trainer.grpo_trainer").GRPOTrainer

    def advantages(self, rows: StepRows, options: Options) -> Floats:
        """Compute advantages [N, T] in float64. Raises CannotRun."""
        counts, order = np.bincount(rows.groups), np.argsort(rows.groups, kind="stable")
        if counts.min() != counts.max() or counts[0] < 2:
            raise CannotRun(TABLES["texts"]["answers"].format(counts.min(), counts.max()))
        rewards = torch.from_numpy(rows.rewards[order] * options.reward_scaling)
        ids = [[1]] * len(order)
        stand_in = trl_stand_in(
            _generate=lambda prompts: (ids, ids, None, [""] * len(order), None, {}, None, []),
            _calculate_rewards=lambda *_: rewards[:, None],
            num_generations=int(counts[0]),
            scale_rewards=options.std or "none",
        )
        with in_float64():
            found = self.trainer._generate_and_score_completions(stand_in, [{"prompt": ""}] * len(order))
        by_row = np.empty(len(order))
        by_row[order] = found["advantages"].numpy()
        return np.where(mask_of(rows, options), by_row[:, None], 0.0)

    def loss(self, given: LossInputs, options: Options) -> tuple[float, Tensor]:
        """Compute the loss of an update, and its gradient by `given.current`. Raises CannotRun."""
        kinds = {how: kind for kind, how in TABLES["values"]["aggregations"].items() if kind != "cispo"}
        if options.micro_batches > 1 or len(given.ranks.unique()) > 1:
            kinds.pop("token-mean of each micro-batch")
        if options.aggregation not in kinds:
            raise CannotRun(f"TRL has no aggregation {options.aggregation}")
        high = options.clip_low if options.clip_high is None else options.clip_high
        mask = given.mask.long()
        inputs = {
            "prompt_ids": mask[:, :0],
            "prompt_mask": mask[:, :0],
            "completion_ids": mask,
            "completion_mask": mask,
            "num_items_in_batch": mask.sum(),
        } | {name: getattr(given, ours) for name, ours in TABLES["trl-self"]["inputs"].items()}

        def compute(current: Tensor) -> Tensor:
            stand_in = trl_stand_in(
                _get_per_token_logps_and_entropies=lambda *_, **__: (current, 0 * current.detach(), None),
                loss_type="cispo" if options.clipped == CISPO else kinds[options.aggregation],
                epsilon_high=high + (options.clipped == CISPO),
                **named(options, TABLES["trl-self"]["options"]),
            )
            if options.correction is not None:
                stand_in.use_vllm = stand_in.vllm_importance_sampling_correction = True
                inputs["importance_sampling_ratio"] = correction(given, options)
            stand_in.args.delta = options.dual_clip
            stand_in.args.use_bias_correction_kl = options.kl_weight == "ratio"
            loss: Tensor = self.trainer._compute_loss(stand_in, None, inputs)
            return loss

        return gradient_of(compute, given)


def named(options: Options, names: Mapping[str, str]) -> dict[str, Any]:
    """Return options by the names that a framework has for them."""
    return {theirs: getattr(options, name) for theirs, name in names.items()}


def trl_stand_in(**given: Any) -> SimpleNamespace:
    """Return what GRPOTrainer's methods read of `self`: one process, no tools, no vLLM."""
    table = TABLES["trl-self"]
    found = with_none(table["values"]) | {
        name: SimpleNamespace(**with_none(row)) for name, row in table["objects"].items()
    }
    found["accelerator"].device = torch.device("cpu")
    for name in ("gather", "reduce", "gather_for_metrics"):
        setattr(found["accelerator"], name, lambda value, *_, **__: value)
    logs, metrics = (defaultdict[str, Any](lambda: defaultdict(list)) for _ in range(2))
    logs |= {"prompt": [], "completion": [], "advantages": []}
    found |= {"_logs": logs, "_metrics": metrics, "_pending_extra_logs": {}, "_pending_metrics": {}}
    return SimpleNamespace(**found | {"reward_weights": torch.ones(1), "reward_funcs": [None]} | given)


class Verl:
    """The functions of verl.trainer.ppo.core_algos, with the methods of `Trl`."""

    name = "verl"
    view = staticmethod(as_verl)

    def __init__(self) -> None:
        self.algorithms = imported("verl.trainer.ppo.core_algos")

    def advantages(self, rows: StepRows, options: Options) -> Floats:
        values = rows.tensors.get("values")
        mask = mask_of(rows, options)
        if options.mean is None and values is None:
            raise CannotRun("the record has no values of a critic, which verl's GAE needs")
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        token_rewards = np.zeros(mask.shape)
        token_rewards[np.arange(len(last)), last] = rows.rewards
        if options.kl_reward_coef and "ref_logp" in rows.tensors:
            old = rows.tensors.get("prox_logp", rows.tensors["logprobs"])
            kl = self.kl(
                torch.from_numpy(old), torch.from_numpy(rows.tensors["ref_logp"]), options.kl_reward_estimator
            )
            token_rewards -= options.kl_reward_coef * np.where(mask, kl.numpy(), 0.0)
        common = {
            "token_level_rewards": torch.from_numpy(token_rewards),
            "response_mask": torch.from_numpy(mask).double(),
        }
        index = groups_of(rows, options)
        code = self.algorithms
        with in_float64():
            if options.mean is None:
                found = code.compute_gae_advantage_return(
                    **common, values=torch.from_numpy(values), gamma=options.discount, lam=options.gae_lambda
                )[0]
            elif options.leave_one_out:
                found = code.compute_rloo_outcome_advantage(**common, index=index)[0]
            elif options.token_std is not None:
                found = code.compute_reinforce_plus_plus_baseline_outcome_advantage(**common, index=index)[0]
            else:
                found = code.compute_grpo_outcome_advantage(
                    **common, index=index, norm_adv_by_std_in_grpo=options.std is not None
                )[0]
        return np.where(mask, found.numpy(), 0.0)

    def kl(self, logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
        """Estimate a KL per token with verl's function."""
        found: Tensor = self.algorithms.kl_penalty(logprobs, reference, estimator)
        return found

    def loss(self, given: LossInputs, options: Options) -> tuple[float, Tensor]:
        config_class = imported("verl.workers.config").ActorConfig
        mode = (
            "cispo" if options.clipped == CISPO else "vanilla" if options.ratio_level == "token" else "gspo"
        )
        high = options.clip_low if options.clip_high is None else options.clip_high
        usual = replace(options, clip_high=high, dual_clip=options.dual_clip or 3.0)
        of_usual = named(usual, TABLES["verl-actor"])
        config = config_class(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **of_usual)
        config.global_batch_info["loss_scale_factor"] = options.max_length
        mask = given.mask.double()

        def compute(current: Tensor) -> Tensor:
            loss: Tensor = self.algorithms.get_policy_loss_fn(mode)(
                old_log_prob=current.detach() if given.old is None else given.old,
                log_prob=current,
                advantages=given.advantages,
                response_mask=mask,
                loss_agg_mode=options.aggregation,
                config=config,
                rollout_is_weights=None if options.correction is None else correction(given, options),
            )[0]
            if options.kl_coef and given.reference is not None:
                kl = self.kl(current, given.reference, options.kl_estimator)
                loss = loss + options.kl_coef * self.algorithms.agg_loss(
                    kl, mask, options.aggregation, loss_scale_factor=options.max_length
                )
            return loss

        return gradient_of(compute, given)


Framework = Trl | Verl
FRAMEWORKS: dict[str, type[Framework]] = {"trl": Trl, "verl": Verl}

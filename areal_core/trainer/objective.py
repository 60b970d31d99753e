"""The objective of policy optimisation: advantages of a batch, and the loss with its statistics.

Functions and a class of the user take the place of ours by their import paths (`build_objective`);
docs/custom_algorithms.md has their shapes.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.advantages import (
    compute_advantages,
    overlong_penalty,
    runs_of,
    shape_rewards,
)
from areal_core.algorithm.alignment import shifted_left, to_next_token
from areal_core.algorithm.gae_lambda import lengths_of
from areal_core.algorithm.losses import (
    aggregate_loss,
    cispo_loss,
    distillation_loss,
    entropy_bonus,
    kl_loss,
    loss_denominator,
    policy_loss,
    sapo_loss,
)
from areal_core.algorithm.normalization import (
    SumOverRanks,
    normalize_episodes,
    normalize_groups,
    normalize_tokens,
)
from areal_core.algorithm.off_policy import (
    behaviour_weights,
    loglinear_proximal_logprobs,
    loglinear_share,
    second_moment_mask,
)
from areal_core.config import PPOActorConfig, TeacherConfig
from areal_core.config.import_paths import import_object
from areal_core.config.train_engine import OWN_CODE, NormConfig
from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.errors import ConfigError
from areal_core.telemetry.stats import Reduce, Stats
from areal_core.trainer.build_models import BaseReference
from areal_core.trainer.step_stats import log_approximations

logger = logging.getLogger(__name__)
Computed = Tensor | tuple[Tensor, dict[str, Tensor | float]]  # with statistics by name


@dataclass(frozen=True)
class PolicyObjective:
    """The options of the actor, and of its teacher if there is one, as functions of batches.

    Attributes:
        loss_fn: (logprobs, entropy, flat) to losses, all [tokens].
        advantage_fn: (rewards [B], inputs) to advantages [B, T].
        reward_shaping_fn: (rewards, batch) to rewards, [B].
        gae_lambda_fn: `gae_lambda.lengths_of` rows to the lambda of each row, [B].
        normalizes_episodes: rewards of agents' episodes are normalised within their group first.
        on_term: (name, loss []) of each term of a micro-batch's loss, with its coefficient.
    """

    options: PPOActorConfig
    sum_over_ranks: SumOverRanks
    stats: Stats
    distillation: TeacherConfig | None = None
    loss_fn: Callable[..., Computed] | None = None
    advantage_fn: Callable[..., Computed] | None = None
    reward_shaping_fn: Callable[..., Computed] | None = None
    gae_lambda_fn: Callable[..., Computed] | None = None
    normalizes_episodes: bool = False
    on_term: Callable[[str, Tensor], None] | None = None

    def learning_inputs(
        self,
        batch: Batch,
        actor: FSDPEngine,
        reference: FSDPEngine | BaseReference | None,
        version: int,
        *,
        values: Tensor | None = None,
        teacher: FSDPEngine | None = None,
    ) -> Batch:
        """Compute all that the loss of a batch needs besides current log-probs; a collective.

        Collective because sharded models compute log-probs and norms are reduced over ranks.

        Args:
            batch: token-aligned rows of this rank.
            reference: the model that the KL is taken to, if there is one.
            version: of the trainer's weights.
            values: of a critic, [B, T], one for every token.
            teacher: the model that is distilled, if there is one.

        Returns:
            The batch, next-token aligned, with these keys, all [B, T]: `prox_logp`, `advantages`,
            `returns`, `kl_rewards`, `total_rewards`; `ref_logp` with a reference; `teacher_logp`
            with a teacher; `values` with a critic; `entropy` if `prox_logp` is computed here;
            `trusted_mask` (int32) for M2PO; `proximal_share` if `prox_logp` is approximated.
        """
        options = self.options
        aligned = to_next_token(batch)
        mask = aligned["loss_mask"].bool()
        scored = self._scored(aligned, actor, reference, teacher)
        proximal = scored["prox_logp"]
        behaviour = aligned["logprobs"] if options.use_decoupled_loss else proximal
        rewards = self._sequence_rewards(batch)
        turns = shifted_left(batch["turns"], 0) if "turns" in batch else None
        by_turn = options.gae_timestep_unit == "turn"
        learned = compute_advantages(
            rewards,
            mask,
            behaviour,
            batch["attention_mask"],
            batch["finish_reason"],
            reference_logprobs=scored["ref_logp"] if reference is not None and options.kl_ctl > 0 else None,
            values=values,
            kl_ctl=options.kl_ctl,
            kl_estimator=options.kl_estimator,
            discount=options.discount,
            gae_lambda=self._lambda(mask, turns),
            mask_no_eos_with_zero=options.mask_no_eos_with_zero,
            turns=(runs_of(mask) if turns is None else turns) if by_turn else None,
        )
        advantages = learned.advantages
        if self.advantage_fn is not None:
            given = aligned | scored | vars(learned) | ({} if values is None else {"values": values})
            advantages = self._computed("advantage_fn", self.advantage_fn(rewards, given), mask)
        if options.adv_norm is not None:
            norm = norm_arguments(options.adv_norm, self.sum_over_ranks)
            advantages = normalize_tokens(advantages, mask, group_ids=batch["prompt_id"], **norm)
        inputs = {
            "logprobs": behaviour,
            "advantages": advantages,
            "returns": learned.returns,
            "kl_rewards": learned.kl_rewards,
            "total_rewards": learned.total_rewards,
        }
        if values is not None:
            inputs["values"] = values
        if options.m2_threshold is not None:
            # Over the batch of all ranks, so that it does not depend on how the batch is divided.
            inputs["trusted_mask"] = second_moment_mask(
                proximal, behaviour, mask, options.m2_threshold, sum_over_ranks=self.sum_over_ranks
            ).int()
        if uses_proximal_share(options):
            inputs["proximal_share"] = loglinear_share(aligned["versions"], version)
        return aligned | scored | inputs

    def _lambda(self, mask: Tensor, turns: Tensor | None) -> float | Tensor:
        if self.gae_lambda_fn is None:
            return self.options.gae_lambda
        found = self.gae_lambda_fn(lengths_of(mask, turns, self.options.gae_timestep_unit))
        chosen = self._computed("gae_lambda_fn", found, torch.ones_like(mask[:, 0]))
        if not chosen.isfinite().all():
            raise ConfigError(f"actor.gae_lambda_fn returned {chosen.tolist()}; expected finite numbers")
        return chosen

    def _scored(
        self,
        aligned: Batch,
        actor: FSDPEngine,
        reference: FSDPEngine | BaseReference | None,
        teacher: FSDPEngine | None,
    ) -> Batch:
        """Compute the log-probs [B, T] `prox_logp`, and `ref_logp`, `teacher_logp` of given models.

        With `entropy` [B, T] if the actor recomputes `prox_logp`.
        """
        timing, scored = self.stats.timing, {"prox_logp": aligned["logprobs"]}
        if self.options.should_compute_prox_logp():
            with timing("recompute_logp"):
                scored["prox_logp"], scored["entropy"] = actor.score(aligned)
        for name, model in {"ref_logp": reference, "teacher_logp": teacher}.items():
            if model is not None:
                with timing(name):
                    scored[name] = model.compute_logprobs(aligned)
        return scored

    def _sequence_rewards(self, batch: Batch) -> Tensor:
        """Shape and normalise the rewards, [B]."""
        options, rewards = self.options, batch["rewards"]
        if self.normalizes_episodes and "turns" not in batch:
            report_once("gconfig.reward_normalization has no effect: no agent sampled these rows")
        elif self.normalizes_episodes:
            rewards = normalize_episodes(
                rewards, batch["prompt_id"], batch.get("episode", batch["sample_id"])
            )
        if self.reward_shaping_fn is not None:
            shaped = self.reward_shaping_fn(rewards, batch)
            rewards = self._computed("reward_shaping_fn", shaped, torch.ones_like(rewards, dtype=torch.bool))
        if options.overlong_reward_penalty:
            assert options.overlong_tokens is not None
            assert options.overlong_penalty_factor is not None
            rewards = rewards + overlong_penalty(
                batch["loss_mask"].sum(1),
                options.max_new_tokens,
                options.overlong_tokens,
                options.overlong_penalty_factor,
            )
        rewards = shape_rewards(
            rewards, bias=options.reward_bias, scaling=options.reward_scaling, clip=options.reward_clip
        )
        if options.reward_norm is None:
            return rewards
        return normalize_groups(
            rewards, batch["prompt_id"], **norm_arguments(options.reward_norm, self.sum_over_ranks)
        )

    def denominator(self, rows: Batch) -> Tensor:
        """Return what the `loss` of next-token aligned rows is divided by."""
        options = self.options
        return loss_denominator(rows["loss_mask"], options.loss_aggregation, options.max_new_tokens)

    def loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        """Policy loss of a packed micro-batch, summed as its aggregation says; records statistics.

        Args:
            logprobs, entropy: of the current weights, [tokens].
            flat: packed rows of `learning_inputs`, each per-token key [tokens].
        """
        options, stats = self.options, self.stats
        mask = flat["loss_mask"].bool()
        stats.denominator(n_valid_tokens=mask)
        proximal = self._proximal_logprobs(logprobs, flat)
        trusted = self._trusted_tokens(mask, flat)
        kept, weights = self._behaviour_weights(proximal, trusted, flat)
        surrogate = self._gated_loss if options.use_sapo_loss else self._clipped_loss
        if self.loss_fn is not None:
            surrogate = partial(self._given_loss, self.loss_fn, entropy)
        losses, details = surrogate(logprobs, proximal, kept, weights, flat)
        loss = self.term("policy", self._total(losses, flat))
        if options.entropy_coef != 0.0:
            bonus = self._total(entropy_bonus(entropy, mask, options.entropy_coef), flat)
            loss = loss + self.term("entropy", bonus)
        if options.kl_loss_coef != 0.0:
            divergence = kl_loss(logprobs, flat["ref_logp"], mask, options.kl_loss_estimator)
            stats.stat("n_valid_tokens", kl_loss=divergence)
            loss = loss + self.term("kl", options.kl_loss_coef * self._total(divergence, flat))
        stats.stat(
            "n_valid_tokens",
            importance_weight=details["importance_weight"],
            approx_kl=details["approx_kl"],
            new_logp=logprobs,
            old_logp=flat["logprobs"],
            entropy=entropy,
            actor_loss=details["loss"],
        )
        if self.distillation is None:
            return loss
        return self._with_teacher(self.distillation, loss, logprobs, kept, flat)

    def term(self, name: str, loss: Tensor) -> Tensor:
        """Return a term of the loss, [], and name it for `replay --anatomy`.

        An own `loss` calls it with each term that it adds.
        """
        if self.on_term is not None:
            weight = 1.0 if self.distillation is None else self.distillation.rl_loss_weight
            self.on_term(name, weight * loss)
        return loss

    def _total(self, losses: Tensor, flat: Batch) -> Tensor:
        """Return the sum of losses [tokens] that `denominator` divides."""
        return aggregate_loss(losses, flat["loss_mask"], flat["cu_seqlens"], self.options.loss_aggregation)

    def _proximal_logprobs(self, logprobs: Tensor, flat: Batch) -> Tensor:
        """Return the proximal log-probs [tokens], with "loglinear" an approximation of them.

        With "reuse_train_logp" they are those of this forward: the step has one optimizer step.
        "metrics" keeps the computed ones and records the errors of the approximations.
        """
        proximal, behaviour = flat["prox_logp"], flat["logprobs"]
        if self.options.use_decoupled_loss and self.options.prox_logp_method == "reuse_train_logp":
            return logprobs.detach()
        if not uses_proximal_share(self.options):
            return proximal
        share = flat["proximal_share"]
        if self.options.prox_logp_method == "loglinear":
            return loglinear_proximal_logprobs(logprobs, behaviour, share)
        if self.options.prox_logp_method == "metrics":
            log_approximations(self.stats, logprobs, proximal, behaviour, share)
        return proximal

    def _trusted_tokens(self, mask: Tensor, flat: Batch) -> Tensor:
        if self.options.m2_threshold is None:
            return mask
        trusted = mask & flat["trusted_mask"].bool()
        self.stats.stat("n_valid_tokens", Reduce.AVG, m2_filtered_fraction=(mask & ~trusted).float())
        return trusted

    def _behaviour_weights(
        self, proximal: Tensor, trusted: Tensor, flat: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that train (bool, [tokens]) and their weights, proximal / behaviour.

        Weights are None if these policies are taken to be the same (`behaviour_bounds`).
        """
        bounds = behaviour_bounds(self.options)
        if bounds is None:
            return trusted, None
        behaviour, stats = flat["logprobs"], self.stats
        kept, weights, filtered = behaviour_weights(
            proximal, behaviour, trusted, flat["cu_seqlens"], **bounds
        )
        stats.denominator(unclipped_behave_tokens=kept)
        stats.stat(
            "unclipped_behave_tokens", behave_imp_weight=weights, behave_approx_kl=proximal - behaviour
        )
        stats.stat("n_valid_tokens", Reduce.AVG, rs_filtered_fraction=filtered.float())
        return kept, weights

    def _with_teacher(
        self, weights: TeacherConfig, loss: Tensor, logprobs: Tensor, kept: Tensor, flat: Batch
    ) -> Tensor:
        losses, details = distillation_loss(logprobs, flat["teacher_logp"], flat["logprobs"], kept)
        distilled = self._total(losses, flat)
        if self.on_term is not None:
            self.on_term("distillation", weights.distill_loss_weight * distilled)
        self.stats.stat("n_valid_tokens", rkl_loss=details["loss"])
        if weights.rl_loss_weight == 0:  # left out, not multiplied: 0 times an infinite loss is nan
            return weights.distill_loss_weight * distilled
        return weights.rl_loss_weight * loss + weights.distill_loss_weight * distilled

    def _clipped_loss(
        self, logprobs: Tensor, proximal: Tensor, kept: Tensor, weights: Tensor | None, flat: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        options, stats = self.options, self.stats
        tokens, higher = (logprobs, proximal, flat["advantages"], kept), options.eps_clip_higher
        if options.use_cispo_loss:
            assert higher is not None
            loss, details = cispo_loss(
                *tokens, eps_clip=options.eps_clip, eps_clip_higher=higher, weights=weights
            )
        else:
            loss, details = policy_loss(
                *tokens,
                flat["cu_seqlens"],
                eps_clip=options.eps_clip,
                eps_clip_higher=higher,
                c_clip=options.c_clip,
                level=options.importance_sampling_level,
                weights=weights,
            )
        stats.denominator(clipped_tokens=details["clip_mask"])
        if options.c_clip is not None:
            stats.denominator(dual_clipped_tokens=details["dual_clip_mask"])
        stats.stat("clipped_tokens", clipped_new_logp=logprobs, clipped_old_logp=flat["logprobs"])
        stats.stat(
            "n_valid_tokens",
            clip_ratio=details["clip_mask"].float(),
            dual_clip_ratio=details["dual_clip_mask"].float(),
        )
        return loss, details

    def _given_loss(
        self,
        loss_fn: Callable[..., Computed],
        entropy: Tensor,
        logprobs: Tensor,
        proximal: Tensor,
        kept: Tensor,
        weights: Tensor | None,
        flat: Batch,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        found = loss_fn(logprobs, entropy, flat | {"prox_logp": proximal, "loss_mask": kept.int()})
        # where, not a product: a masked token may hold inf, and inf * 0 is nan
        loss = torch.where(kept, self._computed("loss_fn", found, flat["loss_mask"].bool()), 0.0)
        if logprobs.requires_grad and not loss.requires_grad:
            raise ConfigError(
                "actor.loss_fn returned losses without a gradient: it must not detach `logprobs`"
            )
        loss = loss if weights is None else loss * weights
        log_ratio = torch.where(kept, logprobs - proximal, 0.0).detach()
        details = {"loss": loss.detach(), "importance_weight": log_ratio.exp(), "approx_kl": log_ratio}
        return loss, details

    def _computed(self, name: str, found: Computed, mask: Tensor) -> Tensor:
        """Return what a function of the user computed, and record its statistics in its scope.

        Raises:
            ConfigError: the shape is another one, or a statistic is neither a number nor of it.
        """
        value, statistics = found if isinstance(found, tuple) else (found, {})
        if not isinstance(value, Tensor) or value.shape != mask.shape or not value.is_floating_point():
            raise ConfigError(
                f"actor.{name} returned {described(value)}; expected a floating-point tensor of "
                f"{list(mask.shape)}, or (that tensor, statistics by name)"
            )
        with self.stats.scope(name):
            if statistics:
                self.stats.denominator(counted=mask)
            for key, given in statistics.items():
                numbers = torch.as_tensor(given, device=mask.device)
                if numbers.dim() == 0:
                    self.stats.scalar(**{key: numbers})
                elif numbers.shape == mask.shape:
                    self.stats.stat("counted", Reduce.AVG_MIN_MAX, **{key: numbers.float()})
                else:
                    raise ConfigError(
                        f"actor.{name} returned {described(given)} as the statistic {key!r}; expected a number, "
                        f"or a tensor of {list(mask.shape)}"
                    )
        return value

    def _gated_loss(
        self, logprobs: Tensor, proximal: Tensor, kept: Tensor, weights: Tensor | None, flat: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute `sapo_loss` and record the statistics of its gates.

        `weights` is unused: the config's checks refuse SAPO with a decoupled loss.
        """
        options = self.options
        loss, details = sapo_loss(
            logprobs,
            proximal,
            flat["advantages"],
            kept,
            tau_pos=options.sapo_tau_pos,
            tau_neg=options.sapo_tau_neg,
        )
        gates = {name: value for name, value in details.items() if name.startswith("sapo_")}
        self.stats.stat("n_valid_tokens", Reduce.AVG_MIN_MAX, **gates)
        return loss, details


ARGUMENTS = {
    "loss_fn": ("logprobs", "entropy", "batch"),
    "advantage_fn": ("rewards", "inputs"),
    "reward_shaping_fn": ("rewards", "batch"),
    "gae_lambda_fn": ("lengths",),
}


def described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)} {value.dtype}"
    return f"a {type(value).__name__}"


def build_objective(
    options: PPOActorConfig,
    sum_over_ranks: SumOverRanks,
    stats: Stats,
    distillation: TeacherConfig | None,
    normalizes_episodes: bool = False,
) -> PolicyObjective:
    """Build the objective, with the class and the functions whose import paths the options have.

    Raises:
        ConfigError: one cannot be imported or is not what is expected, or `objective_kwargs` has
            what none of them takes.
    """
    built = {name: import_object(path, f"actor.{name}") for name in OWN_CODE
             if (path := getattr(options, name)) is not None}  # fmt: skip
    cls = built.pop("objective", PolicyObjective)
    if not (isinstance(cls, type) and issubclass(cls, PolicyObjective)):
        raise ConfigError(
            f"actor.objective {options.objective!r} is not a class derived from PolicyObjective"
        )
    for name, function in built.items():
        if not callable(function):
            raise ConfigError(
                f"actor.{name} {getattr(options, name)!r} is {described(function)}, not a function"
            )
    given = {"options": options} | options.objective_kwargs
    named = {name: set(inspect.signature(found).parameters) & given.keys() for name, found in built.items()}
    of_class = {} if cls is PolicyObjective else set(inspect.signature(cls).parameters) - {"options"}
    if unknown := options.objective_kwargs.keys() - set().union(of_class, *named.values()):
        raise ConfigError(
            f"actor.objective_kwargs has {', '.join(sorted(unknown))}, which no class or function of the section takes"
        )
    functions: dict[str, Any] = {
        name: partial(found, **{key: given[key] for key in named[name]}) for name, found in built.items()
    }
    if options.gae_lambda_fn is not None:
        functions["gae_lambda_fn"] = partial(functions["gae_lambda_fn"], **options.gae_lambda_kwargs)
    for name, found in functions.items():
        takes = ARGUMENTS.get(name, ())
        try:
            inspect.signature(found).bind(*takes)
        except TypeError as error:
            path = getattr(options, name)
            raise ConfigError(
                f"actor.{name} {path!r} cannot be called with ({', '.join(takes)}): {error}"
            ) from None
    own: dict[str, Any] = {key: value for key, value in options.objective_kwargs.items() if key in of_class}
    own |= {"normalizes_episodes": True} if normalizes_episodes else {}
    return cls(options, sum_over_ranks, stats, distillation, **functions, **own)


@cache
def report_once(sentence: str) -> None:
    logger.warning(sentence)


def uses_proximal_share(options: PPOActorConfig) -> bool:
    return options.use_decoupled_loss and options.prox_logp_method in ("loglinear", "metrics")


def behaviour_bounds(options: PPOActorConfig) -> dict[str, Any] | None:
    """Return the arguments of `behaviour_weights`.

    None if behaviour and proximal policy are taken to be the same.

    A decoupled loss without bounds still corrects for the behaviour policy: leaving the ratio out
    would silently train on samples of another policy.
    """
    if (rejection := options.rejection_sampling) is not None:
        return {
            "level": rejection.level,
            "action": rejection.action,
            "metric": rejection.metric,
            "agg": rejection.agg,
            "weight": rejection.weight,
            "upper": rejection.upper,
            "lower": rejection.lower,
        }
    if options.use_decoupled_loss:
        return {"upper": options.behav_imp_weight_cap}
    return None


def norm_arguments(norm: NormConfig, sum_over_ranks: SumOverRanks) -> dict[str, Any]:
    return {
        "mean_level": norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": norm.mean_leave1out,
        "unbiased": norm.std_unbiased,
        "eps": norm.eps,
        "sum_over_ranks": sum_over_ranks,
    }

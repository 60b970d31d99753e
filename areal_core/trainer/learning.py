"""What a policy learns from a batch: its advantages, and its loss with what that says about itself."""

from dataclasses import dataclass

from torch import Tensor

from areal_core.algorithm.advantages import compute_advantages
from areal_core.algorithm.alignment import to_next_token
from areal_core.algorithm.distillation import distillation_loss
from areal_core.algorithm.entropy_bonus import entropy_bonus
from areal_core.algorithm.m2po import second_moment_mask
from areal_core.algorithm.normalization import SumOverRanks, normalize_groups, normalize_tokens
from areal_core.algorithm.policy_loss import policy_loss
from areal_core.algorithm.proximal import loglinear_proximal_logprobs, loglinear_share
from areal_core.algorithm.rejection import behaviour_weights
from areal_core.algorithm.rewards import overlong_penalty, shape_rewards
from areal_core.algorithm.sapo_loss import sapo_loss
from areal_core.batch import Batch
from areal_core.config import PPOActorConfig, TeacherConfig
from areal_core.config.engine import NormConfig
from areal_core.engine.fsdp import FSDPEngine
from areal_core.telemetry import Reduce, Stats
from areal_core.trainer.base_reference import BaseReference
from areal_core.trainer.proximal_stats import log_approximations


@dataclass(frozen=True)
class PolicyObjective:
    """The options of the actor, and of its teacher if it has one, as functions of batches."""

    options: PPOActorConfig
    sum_over_ranks: SumOverRanks
    stats: Stats
    distillation: TeacherConfig | None = None

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
        """The batch, next-token aligned, with `prox_logp`, `advantages`, `returns`, `kl_rewards`, `total_rewards` [B, T].

        With a reference also `ref_logp` [B, T], with a teacher `teacher_logp`, and `entropy` [B, T] where `prox_logp` was
        computed here; for M2PO `trusted_mask` [B, T] int32, and where `prox_logp` is approximated `proximal_share` [B, T].
        `version` is that of the trainer's weights; `values` [B, T], of every token, are those of a critic.

        A collective: logprobs are computed by sharded models, and norms over ranks are sums over ranks.
        """
        options = self.options
        aligned = to_next_token(batch)
        mask = aligned["loss_mask"].bool()
        scored = self._scored(aligned, actor, reference, teacher)
        proximal = scored["prox_logp"]
        behaviour = aligned["logprobs"] if options.use_decoupled_loss else proximal
        learned = compute_advantages(
            self._sequence_rewards(batch),
            mask,
            behaviour,
            batch["attention_mask"],
            batch["finish_reason"],
            reference_logprobs=scored["ref_logp"] if reference is not None else None,
            values=values,
            kl_ctl=options.kl_ctl,
            kl_estimator=options.kl_estimator,
            discount=options.discount,
            gae_lambda=options.gae_lambda,
            mask_no_eos_with_zero=options.mask_no_eos_with_zero,
        )
        advantages = learned.advantages
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
            # Of the whole batch on all ranks, so that it does not depend on how the batch is divided.
            inputs["trusted_mask"] = second_moment_mask(
                proximal, behaviour, mask, options.m2_threshold, sum_over_ranks=self.sum_over_ranks
            ).int()
        if uses_proximal_share(options):
            inputs["proximal_share"] = loglinear_share(aligned["versions"], version)
        return aligned | scored | inputs

    def _scored(
        self,
        aligned: Batch,
        actor: FSDPEngine,
        reference: FSDPEngine | BaseReference | None,
        teacher: FSDPEngine | None,
    ) -> Batch:
        """`prox_logp`, with `entropy` if it was computed here, `ref_logp` and `teacher_logp` of the models that are there, [B, T]."""
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
        """Shaped and normalised rewards [B]."""
        options, rewards = self.options, batch["rewards"]
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

    def loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        """The policy loss of one packed micro-batch, summed over its trained tokens; records its statistics."""
        options, stats = self.options, self.stats
        mask, cu_seqlens = flat["loss_mask"].bool(), flat["cu_seqlens"]
        proximal, behaviour = flat["prox_logp"], flat["logprobs"]
        if uses_proximal_share(options) and options.prox_logp_method == "loglinear":
            proximal = loglinear_proximal_logprobs(logprobs, behaviour, flat["proximal_share"])
        kept, weights = mask, None
        if options.m2_threshold is not None:
            kept = mask & flat["trusted_mask"].bool()
        stats.denominator(n_valid_tokens=mask)
        if uses_proximal_share(options) and options.prox_logp_method == "metrics":
            log_approximations(stats, logprobs, proximal, behaviour, flat["proximal_share"])
        if options.m2_threshold is not None:
            stats.stat("n_valid_tokens", Reduce.AVG, m2_filtered_fraction=(mask & ~kept).float())
        if (bounds := behaviour_bounds(options)) is not None:
            kept, weights, filtered = behaviour_weights(proximal, behaviour, kept, cu_seqlens, **bounds)
            stats.denominator(unclipped_behave_tokens=kept)
            stats.stat(
                "unclipped_behave_tokens",
                behave_imp_weight=weights,
                behave_approx_kl=proximal - behaviour,
            )
            stats.stat("n_valid_tokens", Reduce.AVG, rs_filtered_fraction=filtered.float())
        surrogate = self._gated_loss if options.use_sapo_loss else self._clipped_loss
        loss, details = surrogate(logprobs, proximal, kept, weights, flat)
        if options.entropy_coef != 0.0:
            loss = loss + entropy_bonus(entropy, mask, options.entropy_coef)
        stats.stat(
            "n_valid_tokens",
            importance_weight=details["importance_weight"],
            approx_kl=details["approx_kl"],
            new_logp=logprobs,
            old_logp=behaviour,
            entropy=entropy,
            actor_loss=details["loss"],
        )
        if self.distillation is None:
            return loss
        return self._with_teacher(self.distillation, loss, logprobs, kept, flat)

    def _with_teacher(
        self, weights: TeacherConfig, loss: Tensor, logprobs: Tensor, kept: Tensor, flat: Batch
    ) -> Tensor:
        """The policy loss and the pull towards the teacher, weighted."""
        pull, details = distillation_loss(logprobs, flat["teacher_logp"], flat["logprobs"], kept)
        self.stats.stat("n_valid_tokens", rkl_loss=details["loss"])
        if weights.rl_loss_weight == 0:  # left out, not multiplied: 0 times an infinite loss is nan
            return weights.distill_loss_weight * pull
        return weights.rl_loss_weight * loss + weights.distill_loss_weight * pull

    def _clipped_loss(
        self, logprobs: Tensor, proximal: Tensor, kept: Tensor, weights: Tensor | None, flat: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`policy_loss`, with the statistics that only a clip has."""
        options, stats = self.options, self.stats
        loss, details = policy_loss(
            logprobs,
            proximal,
            flat["advantages"],
            kept,
            flat["cu_seqlens"],
            eps_clip=options.eps_clip,
            eps_clip_higher=options.eps_clip_higher,
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

    def _gated_loss(
        self, logprobs: Tensor, proximal: Tensor, kept: Tensor, weights: Tensor | None, flat: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`sapo_loss`, with its own statistics. Weights are 1: the loss is not decoupled, which the config's checks hold."""
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
        self.stats.stat("n_valid_tokens", **gates)
        return loss, details


def uses_proximal_share(options: PPOActorConfig) -> bool:
    """Whether proximal logprobs are approximated, in place of the computed ones or beside them."""
    return options.use_decoupled_loss and options.prox_logp_method != "recompute"


def behaviour_bounds(options: PPOActorConfig) -> dict[str, object] | None:
    """Arguments of `behaviour_weights`; None where behaviour and proximal policy are taken to be the same.

    A decoupled loss without bounds still corrects for the behaviour policy: leaving the ratio out would silently
    train on samples of another policy.
    """
    if (rejection := options.rejection_sampling) is not None:
        return {
            "level": rejection.level,
            "action": rejection.action,
            "metric": rejection.metric,
            "agg": rejection.agg,
            "upper": rejection.upper,
            "lower": rejection.lower,
        }
    if options.use_decoupled_loss:
        return {"upper": options.behav_imp_weight_cap}
    return None


def norm_arguments(norm: NormConfig, sum_over_ranks: SumOverRanks) -> dict[str, object]:
    """A section of the config as arguments of the normalisations."""
    return {
        "mean_level": norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": norm.mean_leave1out,
        "unbiased": norm.std_unbiased,
        "eps": norm.eps,
        "sum_over_ranks": sum_over_ranks,
    }

"""Options of the models beside the actor (critic and teacher) that must agree with the rest; see `checks.py`."""

from collections.abc import Iterator

from areal_core.config.experiment import PPOConfig


def critic_can_be_trained(config: PPOConfig) -> Iterator[str]:
    critic = config.critic
    if critic is None:
        return
    if not critic.path:
        yield "critic.path is empty; give a model folder, such as ${actor.path}"
    if critic.optimizer is None:
        yield "critic.optimizer is empty, so values would never be learned; give critic.optimizer.lr, or ${actor.optimizer}"
    elif critic.optimizer.lr < 0 or critic.optimizer.eps <= 0 or critic.optimizer.gradient_clipping <= 0:
        yield (
            f"critic.optimizer.lr is {critic.optimizer.lr}, eps {critic.optimizer.eps}, gradient_clipping "
            f"{critic.optimizer.gradient_clipping}; expected lr >= 0 and the others above 0"
        )
    if critic.eps_clip <= 0:
        yield f"critic.eps_clip is {critic.eps_clip}; expected above 0"


def critic_has_returns_to_learn(config: PPOConfig) -> Iterator[str]:
    actor, critic = config.actor, config.critic
    for name in ("discount", "gae_lambda"):
        if not 0 <= getattr(actor, name) <= 1:
            yield f"actor.{name} is {getattr(actor, name)}; expected 0 to 1"
    if critic is None:
        return
    if actor.reward_norm is not None and actor.reward_norm.mean_level == "group":
        yield (
            "critic is given and actor.reward_norm.mean_level is 'group'; relative to its group every prompt is worth 0, which leaves "
            "nothing for values to foretell: set actor.reward_norm to null, or remove the critic section"
        )
    if critic.mask_no_eos_with_zero and not actor.mask_no_eos_with_zero:
        yield (
            "critic.mask_no_eos_with_zero is True and actor.mask_no_eos_with_zero is False; both learn from the same rewards: "
            "set the second to true"
        )


def teacher_scores_what_the_actor_sampled(config: PPOConfig) -> Iterator[str]:
    actor, teacher = config.actor, config.teacher
    if teacher is None:
        return
    if not teacher.path:
        yield "teacher.path is empty; give the folder of the model to learn from"
    if teacher.temperature != actor.temperature:
        yield (
            f"teacher.temperature is {teacher.temperature} and actor.temperature is {actor.temperature}; distillation compares the two: "
            "they must be equal"
        )
    if teacher.rl_loss_weight < 0 or teacher.distill_loss_weight <= 0:
        yield (
            f"teacher.rl_loss_weight is {teacher.rl_loss_weight} and teacher.distill_loss_weight is {teacher.distill_loss_weight}; "
            "expected 0 or more and above 0: without a teacher, remove the section"
        )


SCORER_COUPLINGS = (
    critic_can_be_trained,
    critic_has_returns_to_learn,
    teacher_scores_what_the_actor_sampled,
)

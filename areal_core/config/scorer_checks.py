"""Options of the critic and the teacher that must agree with the rest; see `checks.py`."""

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


def critic_has_returns_to_learn(config: PPOConfig) -> Iterator[str]:
    actor, critic = config.actor, config.critic
    if critic is None:
        return
    if actor.reward_norm is not None and actor.reward_norm.mean_level == "group":
        yield (
            "critic is given and actor.reward_norm.mean_level is 'group'; group-relative rewards average 0 for every prompt, which "
            "leaves values nothing to predict: set actor.reward_norm to null, or remove the critic section"
        )
    if critic.mask_no_eos_with_zero and not actor.mask_no_eos_with_zero:
        yield (
            "critic.mask_no_eos_with_zero is True and actor.mask_no_eos_with_zero is False; both train on the same rewards: "
            "set the second to true"
        )


def teacher_scores_what_the_actor_sampled(config: PPOConfig) -> Iterator[str]:
    actor, teacher = config.actor, config.teacher
    if teacher is None:
        return
    if not teacher.path:
        yield "teacher.path is empty; give the folder of the model to distil"
    if teacher.temperature != actor.temperature:
        yield (
            f"teacher.temperature is {teacher.temperature} and actor.temperature is {actor.temperature}; distillation compares the two: "
            "they must be equal"
        )


SCORER_COUPLINGS = (
    critic_can_be_trained,
    critic_has_returns_to_learn,
    teacher_scores_what_the_actor_sampled,
)

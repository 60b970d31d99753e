"""Policy optimisation: PPO, GRPO and relatives.

`train_steps` is the loop, with every stage of a step in order. `PPOTrainer` does everything around
it: set-up, recovery, logging, error handling and clean-up.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areal_core.agent.transcript import without_transcripts
from areal_core.config import PPOConfig
from areal_core.config.train_engine import OWN_CODE
from areal_core.engine.checkpoint.distributed import Engines
from areal_core.engine.determinism import branch_rng, rng_state
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks
from areal_core.engine.recompute import device_identity
from areal_core.engine.routers import Routers
from areal_core.errors import ConfigError
from areal_core.rollout.episodes import AcceptFn
from areal_core.rollout.loop_thread import short_collections
from areal_core.rollout.source import RolloutSource
from areal_core.rollout.workflow import RLVRWorkflow, RolloutWorkflow
from areal_core.telemetry.loggers import StatsLogger
from areal_core.telemetry.stats import Stats
from areal_core.trainer import build, build_models, build_rollouts
from areal_core.trainer.computed_by import identity
from areal_core.trainer.evaluation import (
    Evaluation,
    evaluated_models,
    evaluated_rows,
    evaluates_only,
    validation_rows,
)
from areal_core.trainer.evaluation_run import EvaluationRun, load_models
from areal_core.trainer.live import LiveRollouts
from areal_core.trainer.nonfinite import NonFiniteGuard
from areal_core.trainer.objective import build_objective
from areal_core.trainer.observed import ObservedRun, Observer
from areal_core.trainer.scored_rollouts import RewardModel, ScoredRollouts
from areal_core.trainer.shared_devices import SharedDevices, TurnRollouts
from areal_core.trainer.step_stats import log_batch, log_settings, log_versions
from areal_core.trainer.update import critic_values, update, update_critic

Turn = Callable[[], contextlib.AbstractContextManager[None]]


def train_steps(
    trainer: "PPOTrainer",
    source: RolloutSource,
    evaluation: Evaluation | None,
    after_step: Callable[[int], None],
) -> None:
    """Run all steps of the run on this rank; each turns one batch into one version of the weights.

    Every rank runs every line, because most of them are collectives. `timing(NAME)` records the
    seconds of a stage as `timeperf/NAME`.

    Args:
        source: provides batches and receives the new weights.
        evaluation: validates after the steps at which it is due; None for no validation.
        after_step: called with the number of each completed step, for what is kept of it.
    """
    config, stats, timing = trainer.config, trainer.stats, trainer.stats.timing
    actor, critic, objective = trainer.actor, trainer.critic, trainer.objective
    engines, guard, observe = trainer.engines, trainer.guard, trainer._observe

    for step in range(trainer.first_step, trainer.end_step):
        with timing("step"):
            # Rollout: this rank's rows of the step. Trained models may leave the device meanwhile.
            with timing("rollout"):
                put_to_sleep(engines)
                batch = source.next_batch(step, trainer.version)
            observe("batch", step=step, version=trainer.version, batch=batch, rng=rng_state())
            batch = without_transcripts(batch)
            branch_rng(trainer.ranks.sequence_parallel_rank)

            # Values of the critic; log-probs of actor, reference and teacher; advantages.
            values = None if critic is None else critic_values(critic, batch, stats)
            with stats.scope("ppo_actor"), timing("compute_advantage"):
                inputs = objective.learning_inputs(
                    batch, actor, trainer.reference, trainer.version, values=values, teacher=trainer.teacher
                )
                log_batch(stats, batch, inputs)
                log_settings(trainer.live_stats, config.actor)
            observe("advantages", step=step, inputs=inputs)

            # Update: the actor, then the critic on the same inputs, a step per minibatch.
            plan: dict[str, Any] = {"total_steps": trainer.total_steps, "device": trainer.device_identity}
            guard.verify(engines, step)
            memory = trainer.tracing.memory(step)
            with stats.scope("ppo_actor"), stats.scope("update"), timing("train_step"), memory:
                log_versions(stats, batch, trainer.version)
                plan["minibatches"] = update(
                    actor,
                    inputs,
                    config.actor.ppo_n_minibatches,
                    objective.loss,
                    stats,
                    partial(observe, step=step),
                    objective.denominator,
                    partial(guard.skipped, "actor", step=step),
                )
            if critic is not None and config.critic is not None:
                plan["critic"] = update_critic(critic, inputs, config.critic, stats, guard, step)
            for engine in engines.values():
                engine.step_schedule()
            trainer.version += 1
            trainer.last_stats = stats.export()
            trainer._observe_step(step, plan, trainer.last_stats)
            guard.check_weights(engines, f"after step {step}", step)
            del batch, values, inputs  # else they stay in memory until the next step replaces them

            # Weight sync: from here on, samples come from the new weights.
            with timing("update_weights"):
                source.update_weights(actor, trainer.version)
            observe("weights", step=step, version=trainer.version)

            # Save the models in Hugging Face format.
            with timing("save"):
                trainer.saver.save_when_due(step)

        # Evaluate on the validation rows.
        if evaluation is not None:
            with timing("eval"):
                evaluation.after_step(step)
        after_step(step)


def put_to_sleep(engines: Engines) -> int:
    """Let every engine that may leave the device do so until it is used again.

    Returns:
        The bytes of device memory that they have released.
    """
    for engine in engines.values():
        engine.sleep()
    return sum(engine.offloaded_bytes for engine in engines.values())


class PPOTrainer(ObservedRun):
    """A run of policy optimisation on this rank, as a context manager.

    Args:
        config: of the run (`load_expr_config`, `wire`).
        train_dataset: rows with `messages`; not needed when `source` is given.
        valid_dataset: validation rows; by default those of `config.valid_dataset`, if it is set.
        source: builds the source of batches from the trainer; by default batches are sampled live
            from `train_dataset`.
        observers: factories of observers, called with the trainer; observers receive the events of
            the run and change nothing.
        total_steps: length of the run, which the learning-rate schedule spans; by default computed
            from config and dataset.
        checkpoint: folder to continue from, written by `save_checkpoint` of the `start` event.
        stop_after: the last step to train, if it is not the run's last.
        print_steps: print one line per step on rank 0.
        stops_at_nonfinite: stop as `actor.nonfinite` says; False for a replay, which follows its
            record.
        join: sets this process up as a rank of the job.

    Raises:
        ConfigError: the run would have no steps.
        ModelError: a model or the tokenizer cannot be loaded, or computes other log-probs than the
            original.
        CheckpointError: the checkpoint to continue from cannot be read.
    """

    # None without the section of the options, or where nothing is trained; `devices` are those that
    # servers share with the trainer
    critic: FSDPEngine | None = None
    reference: FSDPEngine | build_models.BaseReference | None = None
    teacher: FSDPEngine | None = None
    reward_model: RewardModel | None = None
    devices: SharedDevices | None = None
    source: RolloutSource | None = None

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Sequence[dict[str, Any]] | None = None,
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        source: Callable[["PPOTrainer"], RolloutSource] | None = None,
        observers: Sequence[Callable[["PPOTrainer"], Observer]] = (),
        total_steps: int | None = None,
        checkpoint: Path | None = None,
        stop_after: int | None = None,
        print_steps: bool = True,
        stops_at_nonfinite: bool = True,
        join: Callable[[PPOConfig], Ranks] = build.start_process,
    ) -> None:
        self.config, self.print_steps = config, print_steps
        self.train_dataset, self.valid_dataset = train_dataset, valid_dataset
        self.trains = not evaluates_only(config)
        # servers have the devices where nothing is trained
        device = None if self.trains or not config.allocation.has_servers else "cpu"
        if self.trains and total_steps is None:
            total_steps = build.count_steps(config, len(train_dataset or ()))
        self._join(join, replace(config, device=device) if device else config)
        # Of rollouts and validation: kept apart and not recorded, because a replay has neither.
        self.live_stats = Stats(self.ranks.is_group_leader, self.ranks.gather_objects)
        self.built_objective = self.objective = build_objective(
            config.actor, self.ranks.sum, self.stats, config.teacher, config.gconfig.reward_normalization
        )
        self.own_parts: dict[str, Any] = {}
        self.device_identity = device_identity(self.ranks.device)
        self.engines: dict[str, FSDPEngine] = {}  # the trained models: what checkpoints contain
        self.last_stats: dict[str, float] = {}
        if self.trains:
            assert total_steps is not None
            self._build(source, total_steps, checkpoint, stop_after, stops_at_nonfinite)
        else:
            self.processor = build.load_processor_of(config)
            self.reward_model = build_models.build_reward_model(config, self.ranks, self.tokenizer)
            self.total_steps = self.end_step = len(evaluated_models(config))
        self._make_observers(observers)
        self.takes_checksums = self.takes_checksums and self.trains

    def _build(
        self,
        source: Callable[["PPOTrainer"], RolloutSource] | None,
        total_steps: int,
        checkpoint: Path | None,
        stop_after: int | None,
        stops_at_nonfinite: bool,
    ) -> None:
        """Build what trains: models, guard, recovery and saver."""
        config = self.config
        self.total_steps = total_steps
        if source is None:  # no server runs for another source
            sleep = partial(put_to_sleep, self.engines)
            self.devices = build_rollouts.share_devices(config, self.ranks, sleep, self.live_stats)
        self.actor = build.build_engine(config.actor, self.ranks, total_steps)
        if config.rollout.return_routed_experts:
            self.actor.routers = Routers(self.actor.model)
        self.processor = self.actor.processor
        self.critic = build_models.build_critic(config, self.ranks, total_steps)
        self.reference = build_models.build_reference(config, self.ranks, self.actor)
        self.teacher = build_models.build_teacher(config, self.ranks, self.tokenizer)
        if source is None:  # the rows of another source have their rewards
            self.reward_model = build_models.build_reward_model(config, self.ranks, self.tokenizer)
        self.engines |= {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        trained = {"actor": config.actor} | ({"critic": config.critic} if config.critic else {})
        self.guard = NonFiniteGuard(
            config, trained, self.ranks, self.tokenizer, self.stats, stops_at_nonfinite
        )
        self.steps_per_epoch = max(len(self.train_dataset or ()) // config.train_dataset.batch_size, 1)
        self._build_saving(self.steps_per_epoch)
        position = self.recovery.load(self.engines, checkpoint)
        self.first_step, self.version = position.step, position.version
        self.end_step = total_steps if stop_after is None else min(total_steps, stop_after + 1)
        self.source = source(self) if source else None
        self._build_tracing()

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow: Any = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: AcceptFn | str | None = None,
    ) -> None:
        """Train to the last step. If the constructor got a `source`, no argument has an effect.

        An allocation of evaluation ('sglang:d1+eval') trains nothing (`evaluation_run.py`).

        Args:
            workflow: a `RolloutWorkflow` or an agent: an instance, a class, or its import path; by
                default `rollout.agent.agent_cls_path`, or else `RLVRWorkflow`.
            workflow_kwargs: arguments of the class.
            eval_workflow: the same for validation; by default `workflow`.
            eval_workflow_kwargs: by default `workflow_kwargs` with `eval_gconfig` as `gconfig`.
            dynamic_filter_fn: returns, given all rows of a prompt, whether to train on them; or its
                import path.

        Raises:
            ConfigError: there is no dataset and no source, no rollout engine, no validation rows
                although `evaluator` requests them, or a path that cannot be imported.
            NonFiniteError: a weight, or a number of an update, is not finite (`actor.nonfinite`).
            MiscomputedError: a step was computed to other bits again (`debug.verify_every`).
            NothingAccepted: too many prompts in a row were rejected or failed.
            Exception: of an episode, beyond `rollout.max_failures` of them.
        """
        workflow = workflow or self.config.rollout.agent.agent_cls_path or RLVRWorkflow
        if eval_workflow_kwargs is None:
            gconfig = build_rollouts.eval_gconfig(self.config)
            eval_workflow_kwargs = (workflow_kwargs or {}) | {"gconfig": gconfig}
        if not self.trains:
            self._evaluate(eval_workflow or workflow, eval_workflow_kwargs)
            return
        self.guard.check_weights(self.engines, "before the first step")
        source, evaluation = self.source, None
        if source is None:
            dynamic_filter_fn = dynamic_filter_fn or self.config.actor.dynamic_filter_fn
            self.own_parts |= {"workflow": workflow, "dynamic_filter_fn": dynamic_filter_fn}
            live = self._live_rollouts(workflow, workflow_kwargs or {}, dynamic_filter_fn)
            source = build_rollouts.share_rollouts(self.config, self.ranks, live, self.devices)
            turn = source.turn_of_engine if isinstance(source, TurnRollouts) else contextlib.nullcontext
            if self.reward_model is not None:
                source = ScoredRollouts(source, self.reward_model, self.live_stats)
            if self.version > 0:  # the engine has the weights that the run started with
                source.update_weights(self.actor, self.version)
            evaluation = self._evaluation(live, eval_workflow or workflow, eval_workflow_kwargs, turn)
        self._cleanup.callback(source.close)
        if self.recovery.restore(source):
            source.update_weights(self.actor, self.version)
        steps = (self.first_step, self.total_steps)
        with (
            self._start_and_end_observed(),
            build.build_loggers(self.config, self.ranks, steps, self.print_steps) as logger,
            short_collections(),
        ):
            if evaluation is not None and self.config.evaluator.eval_before_train and not self.first_step:
                evaluation.run()
            train_steps(self, source, evaluation, partial(self._after_step, source, logger))
            if self.first_step < self.end_step == self.total_steps:
                self.saver.save_last(self.end_step - 1)
            self.saver.finish()
            self._observe_checkpoint(self.recovery.finish())

    def _evaluate(self, workflow: Any, arguments: dict[str, Any]) -> None:
        """Sample the validation rows with each model; observers and loggers get a step of each."""
        config, stats = self.config, self.live_stats
        rows = evaluated_rows(config, self.train_dataset, self.valid_dataset, self.tokenizer)
        built = self._workflow(workflow, arguments, build_rollouts.eval_gconfig(config))
        run = EvaluationRun(
            config, self.ranks, rows, built, self.tokenizer, self.print_steps, self.reward_model
        )
        with (
            run as evaluation,
            self._start_and_end_observed(),
            build.build_loggers(config, self.ranks, (0, self.total_steps), print_steps=False) as logger,
            contextlib.closing(load_models(config, self.ranks, self.tokenizer, self.processor)) as models,
        ):
            for step, model in enumerate(models):
                states = rng_state()
                batch = evaluation.sample(model, stats)
                batch["prompt_id"] += step * len(rows)  # no prompt occurs in two steps of a run
                self.version, self.last_stats = model.version, stats.export()
                self._observe("batch", step=step, version=model.version, batch=batch, rng=states)
                self._observe_step(step, {}, self.last_stats)
                logger.commit(step, self.last_stats)
            evaluation.finish()

    def _after_step(self, source: RolloutSource, logger: StatsLogger, step: int) -> None:
        """Log the statistics of a completed step and save a recovery checkpoint; a collective."""
        stats = self.last_stats | self.stats.export() | self.live_stats.export()
        logger.commit(step, stats)
        self.tracing.commit(step, stats)
        with self.live_stats.timing("checkpoint_for_recover"):
            saved = self.recovery.save_when_due(step, self.version, self.engines, source)
        self._observe_checkpoint(saved)

    def _live_rollouts(
        self, workflow: Any, arguments: dict[str, Any], filter_fn: AcceptFn | str | None
    ) -> LiveRollouts | None:
        """Build the rollouts of this rank.

        None if rank 0 of its model-parallel group samples the rows that they share.
        """
        if self.train_dataset is None:
            raise ConfigError("PPOTrainer got no train_dataset and no source: one of them gives the batches")
        if not self.ranks.is_group_leader:
            return None
        return build_rollouts.build_live_rollouts(
            self.config,
            self.ranks,
            build.build_loader(self.config, self.ranks, self.train_dataset),
            self._workflow(workflow, arguments, self.config.gconfig, self.train_dataset),
            self.tokenizer,
            should_accept=build_rollouts.build_filter(self.config.actor.dynamic_sampling, filter_fn),
            num_steps=self.end_step,
            stats=self.live_stats,
            tracing=self.tracing,
            processor=self.processor,
            devices=self.devices,
        )

    def _evaluation(
        self, live: LiveRollouts | None, workflow: Any, arguments: dict[str, Any], turn: Turn
    ) -> Evaluation | None:
        """Build the validation of this rank; None if `evaluator` requests none."""
        frequency = build.build_frequency(self.config.evaluator, self.ranks, self.steps_per_epoch)
        self.recovery.keep("evaluator", frequency)
        if not (frequency.is_set or self.config.evaluator.eval_before_train):
            return None
        dataset = validation_rows(self.config, self.valid_dataset, self.tokenizer)
        gconfig = build_rollouts.eval_gconfig(self.config)
        make = partial(self._workflow, workflow, arguments, gconfig)
        return build_rollouts.build_evaluation(
            self.config, self.ranks, live, make, dataset, frequency, self.live_stats, self.reward_model, turn
        )

    def _workflow(
        self, workflow: Any, arguments: dict[str, Any], gconfig: Any, rows: Sequence[dict[str, Any]] = ()
    ) -> RolloutWorkflow:
        arguments = build_rollouts.with_served_rewards(workflow, arguments, self.config.scheduler)
        if "reward_fn" in arguments:
            self.own_parts.setdefault("reward_fn", arguments["reward_fn"])
        return build_rollouts.build_workflow(
            workflow,
            arguments,
            gconfig,
            self.tokenizer,
            self._cleanup.callback,
            self.tracing,
            self.config.rollout.agent,
            self.processor,
            rows[0] if len(rows) else (),
        )

    def _computed_by(self) -> dict[str, Any]:
        """Return the identity of what computes a step besides the trainer, by the option's name."""
        actor = self.config.actor
        parts = {name: getattr(actor, name) for name in OWN_CODE} | self.own_parts
        if self.objective is not self.built_objective:  # the script has set it
            parts["objective"] = self.objective
        return {
            name: identity(value, self.built_objective) for name, value in parts.items() if value is not None
        }

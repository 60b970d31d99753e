"""Policy optimisation: PPO, GRPO and relatives, from one loop that reads top to bottom."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_core.batch import Batch
from areal_core.config import PPOConfig, config_to_dict, without_keys
from areal_core.engine.checkpoint import save_checkpoint
from areal_core.engine.determinism import branch_rng, rng_state
from areal_core.engine.ranks import leave_ranks
from areal_core.errors import ConfigError
from areal_core.rollout.group import AcceptFn
from areal_core.rollout.live import LiveRollouts
from areal_core.rollout.source import RolloutSource
from areal_core.rollout.workflow import RLVRWorkflow, RolloutWorkflow
from areal_core.telemetry import Stats
from areal_core.trainer import build, build_models, build_rollouts
from areal_core.trainer.critic import update_critic
from areal_core.trainer.evaluation import Evaluation, validation_rows
from areal_core.trainer.learning import PolicyObjective
from areal_core.trainer.policy_stats import log_batch, log_settings
from areal_core.trainer.recovery import Recovery, step_of
from areal_core.trainer.saving import Saver
from areal_core.trainer.updates import update
from areal_core.trainer.version_stats import log_versions

# observer(event, **facts): the events and their facts are listed in ARCHITECTURE.md.
Observer = Callable[..., None]


class PPOTrainer:
    """A run of policy optimisation on this rank, as a context manager.

    Args:
        train_dataset: rows with `messages`; not needed when `source` is given.
        valid_dataset: rows to validate on; by default those of `config.valid_dataset`, if it is given.
        source: makes, from the trainer, where batches come from; by default they are sampled live from `train_dataset`.
        observers: makers of observers, called with the trainer; observers are told what happens and change nothing.
        total_steps: of the run, which the learning-rate schedule spans; by default what config and dataset say.
        checkpoint: folder to continue from, as `save_checkpoint` of the `start` event wrote it.
        stop_after: the last step to train, when it is not the run's last.
        print_steps: print one line a step on rank 0.
    """

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
    ) -> None:
        self.config = config
        self.train_dataset = train_dataset
        self.valid_dataset = valid_dataset
        self.print_steps = print_steps
        if total_steps is None:
            total_steps = build.count_steps(config, len(train_dataset or ()))
        self.total_steps = total_steps
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.actor = build.build_engine(config.actor, self.ranks, total_steps)
        self.critic = build_models.build_critic(config, self.ranks, total_steps)
        self.reference = build_models.build_reference(config, self.ranks, self.actor)
        self.teacher = build_models.build_teacher(config, self.ranks, self.tokenizer)
        # What is trained, and so what checkpoints hold.
        self.engines = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        counts = self.ranks.is_data_parallel_head
        self.stats = Stats(counts)
        # Of rollouts and validation: a replay has none, so that a record does not hold them.
        self.live_stats = Stats(counts)
        self.last_stats: dict[str, float] = {}
        self.objective = PolicyObjective(config.actor, self.ranks.sum, self.stats, config.teacher)
        steps_per_epoch = max(len(train_dataset or ()) // config.train_dataset.batch_size, 1)
        self.recovery = Recovery(config, self.ranks, steps_per_epoch)
        self._cleanup.callback(self.recovery.close)
        saving = self.recovery.keep("saver", build.build_frequency(config.saver, self.ranks, steps_per_epoch))
        self.saver = Saver(config, self.engines, self.tokenizer, saving)
        self._cleanup.callback(self.saver.close)
        position = self.recovery.load(self.engines, checkpoint)
        self.first_step, self.version = position.step, position.version
        self.end_step = total_steps if stop_after is None else min(total_steps, stop_after + 1)
        self.source = source(self) if source else None
        self.observers = [make(self) for make in observers]
        # Checksums are collectives: one rank's observer makes all ranks take them.
        self.takes_checksums = self.ranks.maximum(len(self.observers)) > 0
        self.tracing = build.build_tracing(config, self.ranks, self.stats, continued=self.first_step > 0)
        self._cleanup.callback(self.tracing.close)

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow: Any = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: AcceptFn | str | None = None,
    ) -> None:
        """Train to the last step. With a `source` of one's own, no argument is used.

        Args:
            workflow: a `RolloutWorkflow` or an agent, a class of one, or its import path; by default
                `rollout.agent.agent_cls_path`, or else `RLVRWorkflow`.
            workflow_kwargs: arguments of the class.
            eval_workflow: the same for validation; by default `workflow`.
            eval_workflow_kwargs: by default `workflow_kwargs` with `eval_gconfig` as `gconfig`.
            dynamic_filter_fn: told all rows of a prompt, says whether to train on them; or its import path.
        """
        workflow = workflow or self.config.rollout.agent.agent_cls_path or RLVRWorkflow
        arguments = workflow_kwargs or {}
        source, evaluation = self.source, None
        if source is None:
            live = self._live_rollouts(workflow, arguments, dynamic_filter_fn)
            source = build_rollouts.share_rollouts(self.config, self.ranks, live)
            if self.version > 0:  # the engine holds the weights that the run began with
                source.update_weights(self.actor, self.version)
            if eval_workflow_kwargs is None:
                eval_workflow_kwargs = arguments | {"gconfig": build_rollouts.eval_gconfig(self.config)}
            evaluation = self._evaluation(live, eval_workflow or workflow, eval_workflow_kwargs)
        self._cleanup.callback(source.close)
        if self.recovery.restore(source):
            source.update_weights(self.actor, self.version)
        error = None
        try:
            self._observe_start()
            steps = (self.first_step, self.total_steps)
            with build.build_loggers(self.config, self.ranks, steps, self.print_steps) as logger:
                if evaluation is not None and self.config.evaluator.eval_before_train and not self.first_step:
                    evaluation.run()
                for step in range(self.first_step, self.end_step):
                    with self.stats.timing("step"):
                        self._train_step(step, source)
                    if evaluation is not None:
                        with self.stats.timing("eval"):
                            evaluation.after_step(step)
                    stats = self.last_stats | self.stats.export() | self.live_stats.export()
                    logger.commit(step, stats)
                    self.tracing.commit(step, stats)
                    with self.live_stats.timing("checkpoint_for_recover"):
                        saved = self.recovery.save_when_due(step, self.version, self.engines, source)
                    self._observe_checkpoint(saved)
                if self.first_step < self.end_step == self.total_steps:
                    self.saver.save_last(self.end_step - 1)
                self.saver.finish()
                self._observe_checkpoint(self.recovery.finish())
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self._observe("end", steps=self.version, error=error)

    def _train_step(self, step: int, source: RolloutSource) -> None:
        """One batch in, one version of the weights out."""
        timing = self.stats.timing
        with timing("rollout"):
            for engine in self.engines.values():
                engine.sleep()
            batch = source.next_batch(step, self.version)
        self._observe("batch", step=step, version=self.version, batch=batch, rng=rng_state())
        branch_rng(self.ranks.sequence_parallel_rank)
        values = None
        if self.critic is not None:
            with timing("critic_values"):
                values = self.critic.compute_values(batch)
        with self.stats.scope("ppo_actor"):
            with timing("compute_advantage"):
                inputs = self.objective.learning_inputs(
                    batch, self.actor, self.reference, self.version, values=values, teacher=self.teacher
                )
                log_batch(self.stats, batch, inputs)
                log_settings(self.live_stats, self.config.actor)
            self._observe("advantages", step=step, inputs=inputs)
            with self.stats.scope("update"), timing("train_step"):
                log_versions(self.stats, batch, self.version)
                plan = self._update(step, inputs)
        if self.critic is not None:
            with self.stats.scope("ppo_critic"), timing("critic_train_step"):
                plan["critic"] = update_critic(self.critic, inputs, self.config.critic, self.stats)
        for engine in self.engines.values():
            engine.step_schedule()
        self.version += 1
        self.last_stats = self.stats.export()
        checksums = self.checksums() if self.takes_checksums else {}
        self._observe(
            "step", step=step, version=self.version, plan=plan, stats=self.last_stats, checksums=checksums
        )
        with timing("update_weights"):
            source.update_weights(self.actor, self.version)
        self._observe("weights", step=step, version=self.version)
        with timing("save"):
            self.saver.save_when_due(step)

    def _update(self, step: int, inputs: Batch) -> dict[str, Any]:
        """The optimizer steps of the actor; returns the plan that was followed."""
        observe = partial(self._observe, step=step)
        num_minibatches = self.config.actor.ppo_n_minibatches
        plan = update(self.actor, inputs, num_minibatches, self.objective.loss, self.stats, observe)
        return {"total_steps": self.total_steps, "minibatches": plan}

    def checksums(self) -> dict[str, str]:
        """crc32c of every master weight of the actor, and of the critic as `critic.NAME`; a collective."""
        critic = self.critic.checksums() if self.critic is not None else {}
        return self.actor.checksums() | {f"critic.{name}": value for name, value in critic.items()}

    def _live_rollouts(
        self, workflow: Any, arguments: dict[str, Any], filter_fn: AcceptFn | str | None
    ) -> LiveRollouts | None:
        """Those of this rank; None where the head of its group samples the rows that they share."""
        if self.train_dataset is None:
            raise ConfigError("PPOTrainer got no train_dataset and no source: one of them gives the batches")
        if not self.ranks.is_data_parallel_head:
            return None
        return build_rollouts.build_live_rollouts(
            self.config,
            self.ranks,
            build.build_loader(self.config, self.ranks, self.train_dataset),
            self._workflow(workflow, arguments, self.config.gconfig),
            self.tokenizer,
            should_accept=build_rollouts.build_filter(self.config.actor.dynamic_sampling, filter_fn),
            num_steps=self.end_step,
            stats=self.live_stats,
            tracing=self.tracing,
        )

    def _evaluation(
        self, live: LiveRollouts | None, workflow: Any, arguments: dict[str, Any]
    ) -> Evaluation | None:
        steps_per_epoch = max(1, len(self.train_dataset or ()) // self.config.train_dataset.batch_size)
        frequency = self.recovery.keep(
            "evaluator", build.build_frequency(self.config.evaluator, self.ranks, steps_per_epoch)
        )
        if not (frequency.is_set or self.config.evaluator.eval_before_train):
            return None
        dataset = validation_rows(self.config, self.valid_dataset, self.tokenizer)
        gconfig = build_rollouts.eval_gconfig(self.config)
        make = partial(self._workflow, workflow, arguments, gconfig)
        return build_rollouts.build_evaluation(
            self.config, self.ranks, live, make, dataset, frequency, self.live_stats
        )

    def _workflow(self, workflow: Any, arguments: dict[str, Any], gconfig: Any) -> RolloutWorkflow:
        closing = self._cleanup.callback
        return build_rollouts.build_workflow(
            workflow, arguments, gconfig, self.tokenizer, closing, self.tracing, self.config.rollout.agent
        )

    def _observe_start(self) -> None:
        self._observe(
            "start",
            config=without_keys(config_to_dict(self.config)),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            data_parallel_rank=self.ranks.data_parallel_rank,
            data_parallel_size=self.ranks.data_parallel_size,
            model_path=self.config.actor.path,
            tokenizer=self.tokenizer,
            version=self.version,
            save_checkpoint=lambda folder, step: save_checkpoint(
                folder, self.engines, {"step": step, "version": self.version}
            ),
        )

    def _observe_checkpoint(self, whole: Path | None) -> None:
        """Tell of a checkpoint that has become whole, if one has."""
        if whole is not None:
            self._observe("checkpoint", step=step_of(whole), folder=whole)

    def _observe(self, event: str, **facts: Any) -> None:
        for observer in (*self.observers, *self.tracing.observers):
            observer(event, **facts)

    def close(self) -> None:
        """Give back processes, connections and the process group."""
        self._cleanup.close()

    def __enter__(self) -> "PPOTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

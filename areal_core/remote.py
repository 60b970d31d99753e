"""Rollouts on inference servers that run already, without a trainer: for debugging a workflow.

    with RemoteEngine(config) as engine:
        batch = engine.rollout_batch(rows, workflow=MyWorkflow)

The script runs in one process, without torch.distributed and without a GPU, and may be started
again and again against the same servers (`areal-debug serve --background`). Training runs the same
workflow with the same client and executor.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from areal_core.config import PPOConfig
from areal_core.data.batch import Batch, pad_and_concat, sort_canonical
from areal_core.data.loader import PromptLoader
from areal_core.data.rows import Row
from areal_core.errors import ConfigError
from areal_core.launch.job import served_model
from areal_core.paths import run_folder
from areal_core.rollout.errors import WrongServer
from areal_core.rollout.loop_thread import run_on
from areal_core.rollout.pipeline import Executor, PromptFeed
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.rollout.workflow import RLVRWorkflow, RolloutWorkflow, WrittenWorkflow
from areal_core.servers.discovery import wait_until_ready
from areal_core.servers.server import Server
from areal_core.servers.wires import wire_of
from areal_core.telemetry.stats import Stats
from areal_core.trainer.build import build_tracing, load_processor_of, load_tokenizer
from areal_core.trainer.build_rollouts import NO_LIMIT, build_client, build_workflow, discover_servers
from areal_core.trainer.trace_hooks import NO_TRACING

logger = logging.getLogger(__name__)


class RemoteEngine:
    """Inference servers of one model, and the executor of episodes on them; a context manager.

    Every argument that names a workflow is as `PPOTrainer.train` takes it: a `RolloutWorkflow` or
    an agent, as an instance, a class or an import path; by default `rollout.agent.agent_cls_path`,
    or else `RLVRWorkflow`.

    Args:
        config: of the run, with its model and sampling options; `load_expr_config(arguments,
            GRPOConfig, role="rollout")` requires only what rollouts need.
        addresses: `host:port` of the servers, in a list or separated by commas; by default those in
            `AREAL_LLM_SERVER_ADDRS`. Servers that are registered for the experiment are used, too.

    Raises:
        ModelError: the tokenizer or the processor cannot be loaded.

    Attributes:
        tokenizer: of the model.
        processor: of the model's images; None for a model of text.
    """

    def __init__(self, config: PPOConfig, addresses: Sequence[str] | str = ()) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.processor = load_processor_of(config)
        self._addresses = addresses.split(",") if isinstance(addresses, str) else addresses
        self._built: list[tuple[Any, dict[str, Any], RolloutWorkflow]] = []
        self._executor: Executor | None = None
        self._tracing = NO_TRACING
        self._feed: PromptFeed | None = None
        self._cleanup = ExitStack()

    def connect(self) -> "RemoteEngine":
        """Wait for the servers, check what they serve, and use the weights that they hold.

        Raises:
            NoServers: none is known, or none of those that are registered answers.
            ServerDied: one is not ready within `rollout.setup_timeout` seconds.
            WrongServer: an address is invalid, a server is of another version or model, or they
                hold different weights.
        """
        options = self.config.rollout
        discovery = discover_servers(self.config, self._addresses)
        servers = wait_until_ready(discovery, options.setup_timeout)
        version = self._version_of(servers)
        self._executor = Executor(
            build_client(self.config, servers, discovery, knows_versions=False),
            StalenessControl(1, options.max_concurrent_rollouts or NO_LIMIT, NO_LIMIT),
            max_failures=options.max_failures,
            check_format=options.check_trajectory_format,
        )
        self._tracing = build_tracing(self.config, None, Stats())  # in logs/rollout_trace
        self._cleanup.callback(self._tracing.close)
        self._cleanup.callback(self._executor.close)
        if version:
            logger.warning("the servers hold weights of version %d, of an earlier run", version)
            self.set_version(version)
        return self

    def rollout_batch(
        self,
        data: Sequence[Row],
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Run these rows and return all episodes as a padded batch, in their order.

        Args:
            data: rows of a dataset. A row whose episodes fail is left out.
            workflow: see above.
            workflow_kwargs: arguments of its class.
            group_size: episodes per row; by default `gconfig.n_samples`.
            timeout_s: maximum seconds for all of them; None for no limit.

        Returns:
            Tensors by name, [B, T] per token and [B] per row, on the CPU; keys and dtypes are in
            ARCHITECTURE.md, "The batch". `prompt_id` is the number of the row in `data`.

        Raises:
            ConfigError: not connected, or the workflow cannot be built.
            NothingAccepted: no episode returned a row.
            TimeoutError: they have not finished within `timeout_s`.
            Exception: of an episode, beyond `rollout.max_failures` of them.
        """
        built = self._workflow(workflow, workflow_kwargs)
        n_samples = group_size or self.config.gconfig.n_samples
        return self._connected().rollout_batch(
            list(enumerate(data)), built, n_samples=n_samples, timeout_s=timeout_s
        )

    def submit(
        self,
        data: Row,
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int | None = None,
    ) -> int:
        """Start a row and return its task id at once; `wait` returns its episodes.

        Arguments are those of `rollout_batch`.
        """
        built = self._workflow(workflow, workflow_kwargs)
        return self._connected().submit(data, built, n_samples=group_size or self.config.gconfig.n_samples)

    def wait(self, count: int, timeout_s: float | None = None) -> list[Batch | None]:
        """Wait for `count` submitted rows; return those submitted first, None for a failed one.

        Args:
            count: number of rows that were submitted and not returned yet.
            timeout_s: maximum seconds; None for no limit.

        Raises:
            TimeoutError: not so many have finished within `timeout_s`.
            RolloutStuck: not so many were submitted, or none of them can start.
            Exception: of an episode, beyond `rollout.max_failures` of them.
        """
        return self._connected().wait(count, timeout_s)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion; may be awaited on any event loop.

        Raises:
            PromptTooLong: the prompt leaves no space for a new token.
            ServerDied: no server gave a usable reply.
            RequestRefused: no server is left that did not refuse the request.
        """
        executor = self._connected()
        return await run_on(executor.loop.loop, executor.engine.agenerate(req))

    def prepare_batch(
        self,
        data: Sequence[Row],
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int | None = None,
        should_accept: Callable[[Batch], bool] | None = None,
    ) -> Batch:
        """Return the rows of the next `train_dataset.batch_size` accepted prompts of `data`.

        Further calls go on in `data`, in the order of a training run; other arguments are those of
        `rollout_batch`. `should_accept` is called with all rows of a prompt; others take the place
        of rejected ones.

        Raises:
            DatasetError: `data` has fewer rows than a batch.
            NothingAccepted: no prompt of a batch was accepted; and as `rollout_batch`.
        """
        built, executor, config = self._workflow(workflow, workflow_kwargs), self._connected(), self.config
        size = config.train_dataset.batch_size
        if self._feed is None or self._feed.loader.dataset is not data:
            self._feed = PromptFeed(PromptLoader(data, size, seed=config.seed))
        found: list[Batch] = []
        while missing := size - len({prompt for rows in found for prompt in rows["prompt_id"].tolist()}):
            prompts = [self._feed.take() for _ in range(missing)]
            n_samples = group_size or config.gconfig.n_samples
            found.append(
                executor.rollout_batch(prompts, built, n_samples=n_samples, should_accept=should_accept)
            )
        return sort_canonical(pad_and_concat(found))

    def pause(self) -> None:
        """Start no new prompts; running ones continue, until `resume`."""
        self._connected().pause()

    def resume(self) -> None:
        """Start new prompts again."""
        self._connected().resume()

    def set_version(self, version: int) -> None:
        """Use the servers that hold this version of the weights from now on."""
        self._connected().engine.set_version(version)
        self._connected().set_version(version)

    def close(self) -> None:
        """End episodes, connections and processes. The servers keep running."""
        self._cleanup.close()
        self._built.clear()
        self._executor = None

    def __enter__(self) -> "RemoteEngine":
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _version_of(self, servers: Sequence[Server]) -> int:
        held, wire = {}, wire_of(self.config.allocation)
        for server in servers:
            identity = wire.ask_identity(server)
            wire.check_identity(server, identity, served_model(self.config))
            held[server.address] = identity.weight_version
        if len(set(held.values())) > 1:
            listed = ", ".join(f"{address} version {version}" for address, version in held.items())
            raise WrongServer(
                f"the servers hold different weights ({listed}): name servers of one version, or restart them"
            )
        version = next(iter(held.values()))
        return int(version) if version.isdecimal() else 0

    def _connected(self) -> Executor:
        if self._executor is None:
            raise ConfigError("RemoteEngine is not connected: call connect(), or use it in a with statement")
        return self._executor

    def _workflow(self, workflow: Any, arguments: dict[str, Any] | None) -> RolloutWorkflow:
        config, arguments = self.config, arguments or {}
        wanted = workflow or config.rollout.agent.agent_cls_path or RLVRWorkflow
        for known, of, built in self._built:
            if known == wanted and of == arguments:
                return built
        built = build_workflow(
            wanted,
            arguments,
            config.gconfig,
            self.tokenizer,
            self._cleanup.callback,
            self._tracing,
            agent_options=config.rollout.agent,
            processor=self.processor,
        )
        if config.rollout.dump_to_file:
            built = WrittenWorkflow(built, run_folder(config, "logs") / "rollout", self.tokenizer)
        built = self._tracing.workflow(built)
        self._built.append((wanted, arguments, built))
        return built

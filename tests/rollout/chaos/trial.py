"""One seeded schedule of faults against scripted servers, in this process, in a few seconds.

    FaultyServer x 3 <-- client, pool <-- LiveRollouts   the run's own classes
          |                                    |
       replies --------> check_history <-- rows of every step

The trainer is missing: a step takes a batch and sends a tensor as the new weights. In some
schedules it is started again in the middle, from its state.
"""

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_core.data import PromptLoader
from areal_core.data.batch import Batch
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.discovery import Discovery, FolderNames
from areal_core.servers.identity import run_model
from areal_core.servers.pool import ServerPool
from areal_core.servers.sglang import SGLANG
from areal_core.servers.weight_update import DiskUpdate
from areal_core.testing import TokensWorkflow
from areal_core.trainer.live import LiveRollouts
from tests.rollout.chaos.faults import KINDS, REQUEST_TIMEOUT_S, Fault, make_schedule
from tests.rollout.chaos.faulty_server import VOCABULARY, FaultyServer
from tests.rollout.chaos.history import Plan, TrainedRow, Violations, check_history

NUM_SERVERS, NUM_STEPS, BATCH_SIZE, N_SAMPLES, NUM_ROWS = 3, 6, 8, 2, 16
SAMPLING = Sampling(max_new_tokens=24, ignore_eos=True)
SERVER_WAIT_S, LIMIT_S = 15.0, 45.0
REQUESTS_A_SERVER = NUM_STEPS * BATCH_SIZE * N_SAMPLES // NUM_SERVERS


@dataclass(frozen=True)
class Trial:
    seed: int
    schedule: list[Fault]
    staleness: int
    restart_at: int | None  # step before which the trainer was started again
    violations: Violations
    injected: Counter[str]
    num_rows: int
    num_replies: int


class OneTensor:
    """The weights of a model of one tensor."""

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(1)

    def named_adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same: there is no adapter."""
        return self.named_full_tensors()


def run_trial(seed: int, folder: Path, kinds: tuple[str, ...] = KINDS) -> Trial:
    """Run one schedule; `folder` is a new one for names and weights."""
    dice = random.Random(seed)
    schedule = make_schedule(seed, NUM_SERVERS, REQUESTS_A_SERVER, kinds)
    staleness = dice.randrange(3)
    restart_at = dice.randrange(1, NUM_STEPS) if dice.random() < 0.3 else None
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY})
    )
    servers = [
        FaultyServer(str(model), f"server {i}", [fault for fault in schedule if fault.server == i])
        for i in range(NUM_SERVERS)
    ]
    try:
        rows, error = run_steps(servers, folder, staleness, restart_at)
    finally:
        for server in servers:
            server.close()
    replies = [reply for server in servers for reply in server.replies]
    violations = check_history(rows, replies, Plan(BATCH_SIZE, N_SAMPLES, staleness, NUM_STEPS))
    violations.ended += [error] if error else []
    injected = sum((server.injected for server in servers), Counter[str]())
    return Trial(seed, schedule, staleness, restart_at, violations, injected, len(rows), len(replies))


def run_steps(
    servers: Sequence[FaultyServer], folder: Path, staleness: int, restart_at: int | None
) -> tuple[list[TrainedRow], str]:
    """Run all steps; return the rows, and the error that ended them."""
    rows: list[TrainedRow] = []
    source = open_source(servers, folder, staleness)
    try:
        for step in range(NUM_STEPS):
            if step == restart_at:
                state = source.state_dict()
                source.close()
                source = open_source(servers, folder, staleness)
                source.load_state_dict(state)
                source.executor.engine.set_version(step)
            with time_limit(source):
                rows += rows_of(source.next_batch(step, step), step)
                source.update_weights(OneTensor(), step + 1)
    except CancelledError:
        return rows, f"no progress in step {len({row.step for row in rows})} for {LIMIT_S:.0f} s"
    except Exception as error:  # the boundary: it is what the report is about
        notes = "; ".join(getattr(error, "__notes__", ()))
        return rows, f"{type(error).__name__}: {error} ({notes})"
    finally:
        with contextlib.suppress(RuntimeError):  # the loop of a run without progress is closed
            source.close()
    return rows, ""


@contextlib.contextmanager
def time_limit(source: LiveRollouts) -> Iterator[None]:
    timer = threading.Timer(LIMIT_S, source.executor.loop.close)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_source(servers: Sequence[FaultyServer], folder: Path, staleness: int) -> LiveRollouts:
    addresses = [server.server for server in servers]
    model, names = run_model(str(folder / "model")), FolderNames(folder / "names")
    discovery = Discovery(tuple(addresses), names, "chaos", "trial")
    client = FleetClient(
        addresses,
        SGLANG,
        timeout_s=REQUEST_TIMEOUT_S,
        num_retries=2,
        retry_delay_s=0.05,
        discovery=discovery,
        model=model,
        server_wait_s=SERVER_WAIT_S,
        health_interval_s=0.25,
        health_timeout_s=0.5,
        knows_versions=True,
    )
    pool = ServerPool(addresses, SGLANG, 4.0, discovery=discovery, model=model, watch_every_s=0.25)
    update = DiskUpdate(pool, folder / "update", folder / "model")
    executor = Executor(client, StalenessControl(BATCH_SIZE, 3 * BATCH_SIZE, staleness, NUM_STEPS))
    loader = PromptLoader([{"tokens": [5, 6, 100 + i]} for i in range(NUM_ROWS)], BATCH_SIZE)
    return LiveRollouts(executor, loader, TokensWorkflow(SAMPLING), update, n_samples=N_SAMPLES)


def rows_of(batch: Batch, step: int) -> list[TrainedRow]:
    lengths = batch["attention_mask"].sum(1).tolist()
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    return [
        TrainedRow(
            step,
            int(arrays["prompt_id"][i]),
            int(arrays["sample_id"][i]),
            arrays["input_ids"][i, :length].astype(np.int64),
            arrays["loss_mask"][i, :length] != 0,
            arrays["logprobs"][i, :length],
            arrays["versions"][i, :length],
        )
        for i, length in enumerate(lengths)
    ]

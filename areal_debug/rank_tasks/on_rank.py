"""One rank of a replay: `python -m areal_debug.rank_tasks.on_rank TASK ARGUMENTS`, a name and JSON.

`TASKS` names what a rank can be started for. Every rank of a task runs the same function; rank 0
writes what it returns as the report for the command that started the ranks.

Tasks import inside their functions, and this module's own imports are for type checkers: nothing
may initialise torch or its libraries before deterministic mode is on, and no rank loads the modules
of another task.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from areal_debug.start_up import collect_garbage_rarely
from areal_debug.streams import guarded
from areal_debug.train.script import mistakes_as_sentences

if TYPE_CHECKING:
    from areal_core.trainer.observed import Observer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.goto.report import GotoOptions
    from recorder import Record
    from replayer.goto import Scene
    from replayer.request import Request
    from replayer.run import MakeObserver

Report = dict[str, Any] | None


def main(task: str, arguments: str) -> None:
    """Run a task on this rank. A user's error ends it with one sentence instead of a traceback."""
    collect_garbage_rarely()

    def run() -> None:
        with mistakes_as_sentences():
            report = TASKS[task](**json.loads(arguments))
            if report is not None and is_first_rank():
                from areal_debug.render import write_report

                write_report(report)

    guarded(run)


def replay_steps(**members: Any) -> Report:
    """Replay the steps of a Request and print each as it is compared.

    The observer writes the report; the command prints the verdict.
    """
    from areal_debug.replay.observer import replay_reporter
    from areal_debug.wiring import recorder_of
    from replayer.check import StoppedAtDifference
    from replayer.request import Request
    from replayer.run import replay

    request = msgspec.convert(members, Request)
    report = partial(replay_reporter, make_recorder=recorder_of, with_verdict=False)
    observers: list[MakeObserver] = [report]
    if request.record_to is not None:
        observers.append(record_again)
    with suppress(StoppedAtDifference):  # the report contains the difference
        replay(request, observers)
    return None


def record_again(record: "Record", trainer: "PPOTrainer", request: "Request") -> "Observer":
    from areal_debug.wiring import recorder_of
    from recorder import Recording, RecordingOptions

    assert request.record_to is not None
    scope = "full" if record.header.recording.scope == "full" else "plan"
    return recorder_of(trainer, Path(request.record_to), RecordingOptions(Recording(scope), text=True))


def explain_step(**given: Any) -> Report:
    """Compute each sample's share of a step's loss and gradient; `anatomy` adds other parts."""
    from replayer.explain import explain

    return explain(given.pop("record"), **given).to_dict()


def run_layouts_of_step(**given: Any) -> Report:
    """Compute a step in several layouts; of TRL's record without `config` by TRL's own trainer."""
    from recorder import open_record
    from replayer.invariance import run_layouts
    from replayer.preconditions import has_layouts_by_trl

    record, step = open_record(given.pop("record")), given["step"]
    if not has_layouts_by_trl(record, given["config"]):
        return run_layouts(record.path, **given).to_dict()
    from replayer.trl import one_step

    build = partial(one_step.trainer_of, record, given["model"], step)
    return one_step.run_layouts(build, record.path, step).to_dict()


def go_to_step(record: str, step: int, options: dict[str, Any]) -> Report:
    """Replay up to a step and open the requested shell or debugger there; rank 0 prints the way."""
    from rich.console import Console

    from areal_debug.goto.report import GotoOptions, report_of
    from areal_debug.render import console
    from areal_debug.replay.report import print_step
    from areal_debug.report.terminal import print_report
    from replayer.goto import goto

    chosen = GotoOptions(**options)
    out = console() if is_first_rank() and not chosen.as_json else Console(quiet=True)
    report = goto(
        record,
        step,
        lambda scene: visit(scene, chosen),
        stage=chosen.stage,
        model=chosen.model,
        keep_going=chosen.keep_going,
        finish_step=chosen.do == "pdb",
        virtual=chosen.virtual,
        on_step=lambda result: print_step(out, result),
    )
    print_report(out, report_of(report))
    return report.to_dict()


def visit(scene: "Scene", options: "GotoOptions") -> None:
    """Save the weights, open a shell or open the debugger, as requested; a collective."""
    from areal_core.engine.checkpoint.hf_folder import save_hf
    from areal_debug.goto.shell import open_debugger, open_shell

    if options.save is not None:
        save_hf(options.save, scene.trainer.actor, scene.trainer.tokenizer)
    if options.do == "shell":
        open_shell(scene)
    elif options.do == "pdb":
        open_debugger(scene, options.pdb_rank)


def save_recorded_weights(record: str, steps: Sequence[int], folder: str, model: str | None) -> Report:
    """Save the weights before some steps, ascending, of a record."""
    from replayer.goto import save_weights

    save_weights(record, steps, Path(folder), model)
    return {}


def cut_one_step(**members: Any) -> Report:
    """Cut a record to one step, as a CutRequest asks; rank 0 prints how it is reduced."""
    from areal_debug.rank_tasks.shrink import cut_on_rank
    from replayer.bug.cut_request import CutRequest

    return cut_on_rank(CutRequest(**members)).to_dict()


def run_preflight_steps(folder: str, num_steps: int, keep: Sequence[str], config: Sequence[str]) -> Report:
    """Train steps of a configured run and write their bits into `folder`.

    Where deterministic mode is not available, the steps run without it, so that the report can show
    the noise.

    Args:
        keep: parameters whose values are written, too.
        config: arguments as `load_expr_config` accepts them.
    """
    from areal_core.config import PPOConfig, config_to_dict, load_expr_config
    from areal_core.engine.determinism import enforce_determinism
    from areal_core.errors import DeterminismError
    from replayer.preflight.real_steps import run_steps, save_bits
    from replayer.preflight.repeats import write_repeat
    from replayer.preflight.settings import check_process

    options, _ = load_expr_config(list(config), PPOConfig)
    wanted = config_to_dict(options)
    if options.deterministic:
        try:
            enforce_determinism(options.device)
        except DeterminismError:
            options.deterministic = False  # the findings name what is missing
    bits = run_steps(options, num_steps, keep)
    save_bits(bits, Path(folder), bits.process.rank)
    if bits.process.rank == 0:
        write_repeat(Path(folder), bits.outcomes, check_process(wanted, bits.process))
    return None


def measure_parity_of_model(model: str, dtype: str, context: int, tensor: int) -> Report:
    """Compare the log-probs that training computes for a model with those of its own forward."""
    from transformers.utils import logging as transformers_logging

    from areal_core.config import TrainEngineConfig
    from areal_core.engine.parity import measure_parity, refuse_split_rows
    from areal_core.engine.ranks import join_ranks, leave_ranks
    from areal_core.trainer.build import shard_engine

    transformers_logging.set_verbosity_error()
    started = time.monotonic()
    ranks = join_ranks(sequence_parallel=context, tensor_parallel=tensor)
    engine = shard_engine(TrainEngineConfig(path=model, dtype=dtype), ranks)
    loaded = time.monotonic()
    parity = measure_parity(engine)
    refuse_split_rows(engine, parity, model)
    seconds = {"load_s": loaded - started, "check_s": time.monotonic() - loaded}
    leave_ranks()
    return asdict(parity) | seconds


def is_first_rank() -> bool:
    """Return whether this process is rank 0, also where no launcher has numbered the ranks."""
    return os.environ.get("RANK", "0") == "0"


TASKS: dict[str, Callable[..., Report]] = {
    "replay": replay_steps,  # areal-debug replay
    "explain": explain_step,  # areal-debug replay --explain
    "anatomy": partial(explain_step, anatomy=True),  # areal-debug replay --anatomy
    "layouts": run_layouts_of_step,  # areal-debug replay --layouts
    "goto": go_to_step,  # areal-debug goto
    "weights": save_recorded_weights,  # the question of the engine
    "preflight": run_preflight_steps,  # areal-debug check run
    "parity": measure_parity_of_model,  # areal-debug check model
    "cut": cut_one_step,  # areal-debug record cut
}

if __name__ == "__main__":
    main(*sys.argv[1:])

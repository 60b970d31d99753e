"""One rank of a replay: `python -m areal_debug.replay.on_rank TASK ARGUMENT...`.

`TASKS` names what a rank can be started for. Every rank of a task runs the same function; rank 0
writes the report for the command that started the ranks.

Tasks import inside their functions, and this module's own imports are for type checkers: nothing
may initialise torch or its libraries before deterministic mode is on, and no rank loads the modules
of another task.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_debug.start_up import collect_garbage_rarely
from areal_debug.terminal import open_standard_streams
from areal_debug.train.script import mistakes_as_sentences

if TYPE_CHECKING:
    from areal_core.trainer.rl import Observer, PPOTrainer
    from areal_debug.goto.render import GotoOptions
    from recorder import Record
    from replayer.goto import Scene
    from replayer.request import Request
    from replayer.run import MakeObserver


def main(task: str, *arguments: str) -> None:
    """Run a task on this rank. A user's error ends it with one sentence instead of a traceback."""
    collect_garbage_rarely()
    open_standard_streams()
    with mistakes_as_sentences():
        TASKS[task](*arguments)


def replay_steps(request_text: str) -> None:
    """Replay steps and print each as it is compared; the command prints the verdict.

    Args:
        request_text: a `replayer.request.Request` as JSON.
    """
    from areal_debug.replay.observer import replay_reporter
    from areal_debug.wiring import recorder_of
    from replayer.check import StoppedAtDifference
    from replayer.request import parse_request
    from replayer.run import replay

    request = parse_request(request_text)
    report = partial(replay_reporter, make_recorder=recorder_of, with_verdict=False)
    observers: list[MakeObserver] = [report]
    if request.record_to is not None:
        observers.append(record_again)
    try:
        replay(request, observers)
    except StoppedAtDifference:
        return  # the report contains the difference


def record_again(record: "Record", trainer: "PPOTrainer", request: "Request") -> "Observer":
    from areal_debug.wiring import recorder_of
    from recorder import Recording, RecordingOptions

    assert request.record_to is not None
    scope = "full" if record.header.recording.scope == "full" else "plan"
    return recorder_of(trainer, Path(request.record_to), RecordingOptions(Recording(scope), text=True))


def explain_step(record: str, step: str, model: str, config: str) -> None:
    """Compute each sample's share of a step's loss and gradient.

    Args:
        model: folder of the run's first weights; "" for the path in the record.
        config: file with the options; "" for those in the record.
    """
    from areal_debug.render import write_report
    from replayer.explain import explain

    found = explain(record, int(step), model or None, config or None)
    if is_first_rank():
        write_report(found.to_dict())


def go_to_step(record: str, step: str, options_text: str) -> None:
    """Replay up to a step and open the requested shell or debugger there; rank 0 prints the way.

    Args:
        options_text: `GotoOptions` as JSON.
    """
    from rich.console import Console

    from areal_debug.goto.render import GotoOptions, print_report
    from areal_debug.render import console, write_report
    from areal_debug.replay.render import print_step
    from replayer.goto import goto

    options = GotoOptions(**json.loads(options_text))
    out = console() if is_first_rank() and not options.as_json else Console(quiet=True)
    report = goto(
        record,
        int(step),
        lambda scene: visit(scene, options),
        stage=options.stage,
        model=options.model,
        keep_going=options.keep_going,
        finish_step=options.do == "pdb",
        on_step=lambda result: print_step(out, result),
    )
    print_report(out, report)
    if is_first_rank():
        write_report(report.to_dict())


def save_recorded_weights(record: str, steps: str, folder: str, model: str) -> None:
    """Save the weights before some steps of a record.

    Args:
        steps: JSON list, ascending.
        model: folder of the run's first weights; "" for the path in the record.
    """
    from areal_debug.render import write_report
    from replayer.saved_weights import save_weights

    save_weights(record, json.loads(steps), Path(folder), model or None)
    if is_first_rank():
        write_report({})


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


def cut_one_step(request_text: str) -> None:
    """Cut a record to one step; rank 0 prints how it is reduced.

    Args:
        request_text: a `replayer.bug.cut_request.CutRequest` as JSON.
    """
    from areal_debug.record.shrink import cut_on_rank
    from areal_debug.render import write_report

    report = cut_on_rank(request_text)
    if is_first_rank():
        write_report(report.to_dict())


def run_preflight_steps(folder: str, num_steps: str, keep: str, *config_arguments: str) -> None:
    """Train steps of a configured run and write their bits into `folder`.

    Where deterministic mode is not available, the steps run without it, so that the report can show
    the noise.

    Args:
        keep: JSON list of the parameters whose values are written, too.
        config_arguments: as `load_expr_config` accepts them.
    """
    from areal_core.config import PPOConfig, config_to_dict, load_expr_config
    from areal_core.engine.determinism import enforce_determinism
    from areal_core.engine.errors import DeterminismError
    from replayer.preflight.real_steps import run_steps, save_bits
    from replayer.preflight.repeats import write_repeat
    from replayer.preflight.settings import check_process

    config, _ = load_expr_config(list(config_arguments), PPOConfig)
    wanted = config_to_dict(config)
    if config.deterministic:
        try:
            enforce_determinism(config.device)
        except DeterminismError:
            config.deterministic = False  # the findings name what is missing
    bits = run_steps(config, int(num_steps), json.loads(keep))
    rank = bits.process.rank
    save_bits(bits, Path(folder), rank)
    if rank == 0:
        write_repeat(Path(folder), bits.outcomes, check_process(wanted, bits.process))


def is_first_rank() -> bool:
    """Return whether this process is rank 0, also where no launcher has numbered the ranks."""
    return os.environ.get("RANK", "0") == "0"


TASKS: dict[str, Callable[..., None]] = {
    "replay": replay_steps,  # areal-debug replay: REQUEST
    "explain": explain_step,  # areal-debug replay --explain: RECORD STEP MODEL CONFIG
    "goto": go_to_step,  # areal-debug goto: RECORD STEP OPTIONS
    "weights": save_recorded_weights,  # the question of the engine: RECORD STEPS FOLDER MODEL
    "preflight": run_preflight_steps,  # areal-debug preflight: FOLDER STEPS KEEP CONFIG_ARGUMENT...
    "cut": cut_one_step,  # areal-debug record cut: REQUEST
}

if __name__ == "__main__":
    main(*sys.argv[1:])

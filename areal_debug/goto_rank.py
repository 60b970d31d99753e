"""One rank of `areal-debug goto`: `python -m areal_debug.goto_rank RECORD STEP OPTIONS`, options as JSON (`GotoOptions`)."""

import json
import os
import sys

from rich.console import Console

from areal_core.engine.hf_folder import save_hf
from areal_debug.goto_output import GotoOptions, print_report
from areal_debug.goto_shell import open_debugger, open_shell
from areal_debug.render import console
from areal_debug.replay_output import print_step
from areal_debug.report_file import write_report
from areal_debug.script import mistakes_as_sentences
from replayer.goto import Scene, goto


def main(record: str, step: str, options_text: str) -> None:
    """Go to the step; rank 0 prints how, and leaves its report behind for the command."""
    options = GotoOptions(**json.loads(options_text))
    is_first = os.environ.get("RANK", "0") == "0"
    out = console() if is_first and not options.as_json else Console(quiet=True)
    with mistakes_as_sentences():
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
    if is_first:
        write_report(report.to_dict())


def visit(scene: Scene, options: GotoOptions) -> None:
    """What was asked for, at the step; a collective."""
    if options.save is not None:
        save_hf(options.save, scene.trainer.actor, scene.trainer.tokenizer)
    if options.do == "shell":
        open_shell(scene)
    elif options.do == "pdb":
        open_debugger(scene, options.pdb_rank)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`areal-debug`: one file per verb, same name as the verb, imported only when that verb runs."""

import importlib

import click

VERBS = {
    "demo": "demo",
    "train": "train",
    "replay": "replay",
    "goto": "goto",
    "preflight": "preflight",
    "bisect": "bisect",
    "diff": "diff",
    "bisect-step": "bisect_step",
    "record": "record",
    "consistency": "consistency",
    "hang": "hang",
    "trace": "trace",
    "serve": "serve",
    "view": "view",
    "agent": "agent",
    "doctor": "doctor",
}


class LazyGroup(click.Group):
    """A group that imports a verb's file when the verb is asked for, so that `--help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(f"areal_debug.cli.{VERBS[cmd_name]}").command


@click.group(cls=LazyGroup)
def main() -> None:
    """Record, replay and diagnose reinforcement learning of language models."""

"""Print the environment presets of `train --debug-env list`."""

from areal_core.launch.debug_env import PRESETS
from areal_debug.render import console, escaped


def print_presets() -> None:
    """Print each preset: what it finds, what it costs, and what each of its variables does."""
    out = console()
    width = max(len(f"{name}={value}") for preset in PRESETS for name, value in preset.variables.items())
    for preset in PRESETS:
        out.print(f"[bold]{preset.name}[/bold]  {escaped(preset.purpose)}")
        out.print(f"  cost: {escaped(preset.cost)}")
        for name, value in preset.variables.items():
            setting = f"{name}={value}"
            out.print(f"  {escaped(setting):<{width}}  [dim]{escaped(preset.meaning[name])}[/dim]")
        out.print()
    out.print("To use some of them: areal-debug train SCRIPT --debug-env nccl,hang")

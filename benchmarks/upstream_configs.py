"""Plan a run of every config file of upstream AReaL, as `areal-debug train --dry-run` does.

    python -m benchmarks.upstream_configs CLONE [--commit HEAD] [--markdown]

CLONE is a clone of AReaL, also a bare one; nothing in it is run. A file of the clone's own options
is loaded as its script would: with a config class that declares the options that ours lack.
"""

import logging
import os
import re
import tempfile
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from areal_core.config.loading import load_with_notes, read_yaml
from areal_core.config.names import sections_of
from areal_core.errors import ConfigError
from areal_debug.dry_run.plan import plan_run
from areal_debug.train.script_options import method_of
from benchmarks.harness import git, read_options


@dataclass(frozen=True)
class Outcome:
    """One file: the options of its script, and its notes or the reasons of the refusal."""

    file: str
    own: tuple[str, ...]
    runs: bool
    sentences: tuple[str, ...]


def config_files(clone: Path, commit: str) -> dict[str, str]:
    """Return path -> text of the YAML files with the section of a trained model."""
    names = git(clone, "ls-tree", "-r", "--name-only", commit).splitlines()
    texts = {
        name: git(clone, "show", f"{commit}:{name}") for name in names if name.endswith((".yaml", ".yml"))
    }
    return {name: text for name, text in texts.items() if re.search("^(actor|model):", text, re.MULTILINE)}


def load(name: str, text: str) -> Outcome:
    """Plan the run of a file, with a config class that declares the options of its script."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(name).name)
        file.write_text(text)
        try:
            tree = read_yaml(str(file))
        except ConfigError as error:
            return Outcome(name, (), False, (str(error).replace(str(file), name),))
        cls = method_of(tree)
        own = tuple(sorted(set(tree) - set(sections_of(cls)) - {"model", "algorithm"}))
        if own:
            cls = make_dataclass(cls.__name__, [(o, Any, field(default=None)) for o in own], bases=(cls,))
        try:
            config, _, notes = load_with_notes(["--config", str(file)], cls)
            for data in (config.train_dataset, config.valid_dataset):
                if data is not None and Path(data.path).suffix:  # a file that the user prepares
                    data.path = "arithmetic"
            plan_run(Path("train.py"), str(file), config, notes)
        except ConfigError as error:
            lines = str(error).replace(f"{file}: ", "").splitlines()
            return Outcome(name, own, False, tuple(line.strip() for line in lines))
        return Outcome(name, own, True, tuple(notes))


def row(outcome: Outcome) -> str:
    """Return the file's row of the table."""
    cause = "" if outcome.runs else "; and ".join(outcome.sentences)
    own = ", ".join(f"`{name}`" for name in outcome.own)
    return f"| `{outcome.file}` | {'yes' if outcome.runs else 'no'} | {own} | {cause.replace('|', chr(92) + '|')} |"


def main() -> None:
    """Print one line or table row for each file."""
    options = read_options(__doc__, {"clone": Path}, commit="HEAD", markdown=False)
    logging.disable()
    os.environ["HF_HUB_OFFLINE"] = "1"  # as a dry run, which downloads nothing
    outcomes = [load(name, text) for name, text in config_files(options.clone, options.commit).items()]
    if options.markdown:
        print("| file | dry run | options of its script | refused because |\n|---|---|---|---|")
        print("\n".join(row(outcome) for outcome in outcomes))
    else:
        for outcome in outcomes:
            print(f"{outcome.file}: {'runs' if outcome.runs else 'refused'}")
            print("".join(f"    {sentence}\n" for sentence in outcome.sentences), end="")
    print(f"\n{sum(outcome.runs for outcome in outcomes)} of {len(outcomes)} would run.")


if __name__ == "__main__":
    main()

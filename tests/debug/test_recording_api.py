"""docs/recording_api.md, followed to the letter; the names below `areal_debug`."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import recorder
import replayer

from ..forks import COMMAND, run_forked
from .test_guides import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recording_api.md").read_text()
PRINTED = {  # what each command prints, by its first words
    "python": "",
    "areal-debug record ls": "3 steps",
    "areal-debug record show": "2+2=",
    "areal-debug record verify": "intact",
    "areal-debug open": "page.html",
    "areal-debug doctor": "runs/w",
}
FACADES = ("areal_debug", *(f"areal_debug.{verb}" for verb in ("record", "replay", "consistency", "hang")))


def test_the_page_is_followed_to_the_letter(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    seen = set()
    for before, kind, text in blocks(PAGE):
        if kind == "python":
            (tmp_path / re.findall(r"`(\w+\.py)`", before)[-1]).write_text(text)
            continue
        for command in text.splitlines():
            program, *words = shlex.split(command)
            done = run_forked([*{"areal-debug": [COMMAND]}.get(program, []), *words], environment, tmp_path)
            assert (done.returncode, done.stderr) == (0, ""), command
            (words,) = [words for words in PRINTED if command.startswith(words)]
            assert PRINTED[words] in done.stdout
            seen.add(words)
    assert seen == set(PRINTED)
    (line,) = (tmp_path / "runs/w/stats.jsonl").read_text().splitlines()[2:3]
    assert json.loads(line) == {"step": 2, "loss": 1 / 3, "grad_norm": 1.0}


def test_all_public_names_of_the_packages_are_reachable():
    from areal_debug import record, replay

    assert all(getattr(record, name) is getattr(recorder, name) for name in recorder.__all__)
    assert all(getattr(replay, name) is getattr(replayer, name) for name in replayer.__all__)
    assert record.Recorder is importlib.import_module("areal_debug").Recorder


LIGHT = f"import sys, {', '.join(FACADES)}; print(sorted(sys.modules.keys() & {{'numpy', 'torch', 'click'}}))"
USED = """
import sys
from areal_debug import Recorder, Sample, watch
from areal_debug.hang import beat, diagnose
from areal_debug.record import open_record
from areal_debug.replay import Request
print(sorted(sys.modules.keys() & {"torch", "zarr", "transformers", "datasets", "click"}))
"""


@pytest.mark.parametrize("code", [LIGHT, USED])
def test_names_are_imported_when_they_are_used_and_bring_no_torch(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

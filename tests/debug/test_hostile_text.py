"""Text of a record, a run, a config or a path cannot control a terminal, nor be taken for markup.

Every verb runs on a real terminal with inputs whose every text is hostile. A new verb must be added
to `commands`.
"""

import json
import os
import pty
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_core.safety.printable import UNPRINTABLE, printable
from areal_debug.render import styled
from recorder.environment import folder_identity
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, scripted_batch, send_step
from recorder.writer import RecordingOptions, RecordWriter
from tests.command_line import walk

from ..forks import run_forked

# A title, the clipboard, a cleared screen, C1, closing and opening markup, direction, hidden text.
CODES = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x08\x7f\u202e\u2066\u200b\u2028\ufe0f\U000e0041"
MARKUP = "[bold]\\[/oops][/oops][link=http://evil.example]:smile:"
EVIL = f"{CODES}{MARKUP}\r\nFORGED"
NAME = f"run [/oops] {CODES}"  # of a file: two parts of a path
STYLES = re.compile(
    r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\x1b\[1;31m"
)  # colours and progress bars of ours
TEXT_BLOCKS = {"record show"}  # print the lines of a text as lines

DRIVER = """
import json, os, sys, traceback
from areal_debug.cli import main
for name, arguments in json.load(open(sys.argv[1])):
    code = "crash"
    os.write(1, f"<<{name}>>\\n".encode())
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, f"<<exit {code}>>\\n".encode())
"""


RUNNABLE = {
    name for name, command in walk() if not isinstance(command, click.Group) or command.invoke_without_command
}


class HostileTokenizer:
    def decode(self, ids, **_):
        return EVIL

    def batch_decode(self, rows, **_):
        return [EVIL] * len(rows)


def write_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_record(folder: Path, model: dict, ids: list[int], value: float = 1.0) -> Path:
    """A record whose every text is hostile: header, config, plan, statistics, names, texts."""
    writer = RecordWriter(folder, options=RecordingOptions(text=True))
    folder.mkdir(parents=True)
    environment = {"torch": {"build": EVIL}, "code": {"commit": EVIL, "dirty_sha256": EVIL}, EVIL: EVIL}
    header = replace(
        SCRIPTED_HEADER, created=EVIL, allocation=EVIL, model=model, environment=environment,
        config={"seed": 1, EVIL: {EVIL: EVIL + str(value)}, "actor": {"path": EVIL, "lr": value}},
    )  # fmt: skip
    write_header(folder, header)
    writer.tokenizer = HostileTokenizer()
    for step in range(2):
        batch = scripted_batch([len(ids), len(ids)], seed=step)
        batch["input_ids"] = np.array([ids, ids], np.int32)
        batch["rewards"] *= np.float32(value)

        def send(event: str, **facts: object) -> None:
            if event == "step":
                facts |= {"stats": {EVIL: value, "grad_norm": value}, "checksums": {EVIL: f"{value:08.0f}"}}
                facts |= {"plan": {"learning_rate": value, EVIL: EVIL}}
            writer(event, **facts)

        send_step(send, step, batch)
    writer("end", steps=2, error=EVIL)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """The hostile inputs, all below folders with hostile names."""
    top = tmp_path_factory.mktemp("hostile") / NAME
    ids = write_tokenizer(top / "model").encode(EVIL).ids
    identity = folder_identity(str(top / "model"))
    found = {
        "record": write_record(top / "record", identity, ids),
        "without": write_record(top / "without tokenizer", {"path": EVIL, "files": {}}, ids, value=2.0),
        "top": top,
    }
    lines = [
        json.dumps({"step": step, EVIL: step % 3, "ppo_actor/update/grad_norm": 10.0**step})
        for step in range(60)
    ]
    found["stats"] = top / "stats.jsonl"
    found["stats"].write_text("\n".join(lines))
    found["config"] = top / "config.yaml"
    found["config"].write_text(
        json.dumps({"experiment_name": EVIL, "actor": {"path": EVIL, "bogus": EVIL}, EVIL: EVIL})
    )
    found["script"] = top / "script.py"
    found["script"].write_text("raise SystemExit(1)\n")
    found["reward"] = top / "reward.py"
    found["reward"].write_text(
        f"def paid(prompt, completions, prompt_ids, completion_ids, **row):\n    raise ValueError({EVIL!r})\n"
    )
    found["questions"] = top / "questions.jsonl"
    found["questions"].write_text(json.dumps({"prompt": EVIL, "answer": EVIL}))
    found["stacks"] = top / "stacks"
    found["stacks"].mkdir()
    for rank in range(2):
        threads = (
            f'Thread 1 (idle): "{EVIL}"\n    {EVIL} ({EVIL}.py:7)\n    all_reduce (torch/distributed.py:1)\n'
        )
        (found["stacks"] / f"rank_{rank}.txt").write_text(f"Process {rank}: python {EVIL}\n{threads}")
    found["rollouts"] = top / "rollouts.jsonl"
    found["rollouts"].write_text(json.dumps({"input": EVIL, "output": EVIL, "score": 1.0, EVIL: EVIL}))
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": 0,
            "cat": "step",
            "name": EVIL,
            "ts": 0,
            "dur": 5,
            "args": {"step": 0, EVIL: EVIL},
        }
    ]
    found["trace"] = top / "trace.json"
    found["trace"].write_text(json.dumps({"traceEvents": events, "otherData": {EVIL: EVIL, "ranks": []}}))
    return found


def commands(at: dict[str, Path]) -> list[tuple[str, list[str]]]:
    """The rows of the table, and every verb with an option that there is not."""
    places = {name: str(path) for name, path in at.items()} | {"EVIL": EVIL}
    places["absent"] = f"{at['top']}/absent {EVIL}".replace("\0", "")
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["commands"]
    tried = [(name, [*name.split(), *(word.format(**places) for word in words)]) for name, *words in rows]
    return tried + [(name, [*name.split(), "--no-such", EVIL]) for name in sorted(RUNNABLE)]


def on_a_terminal(arguments: list[str], cwd: Path) -> str:
    """Run a program on a pseudo-terminal and return what it printed."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "4000", "TERM": "xterm-256color"}

    def run() -> None:
        try:
            run_forked(arguments, environment, cwd, timeout_s=600, terminal=theirs)
        finally:
            os.close(theirs)

    chunks = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        with suppress(OSError):  # every writer has closed it
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        running.result()
    os.close(ours)
    return b"".join(chunks).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def outputs(places, tmp_path_factory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.py").write_text(DRIVER)
    (folder / "commands.json").write_text(json.dumps(commands(places)))
    printed = on_a_terminal(["driver.py", "commands.json"], folder)
    found = re.findall(r"<<([^>]*)>>\r\n(.*?)<<exit (\S+)>>\r\n", printed, re.DOTALL)
    return [(name, text) for name, text, code in found]


def test_every_verb_is_tried_with_hostile_text(places, outputs):
    tried = [name for name, _ in commands(places)]
    assert set(tried) == RUNNABLE
    assert [name for name, _ in outputs] == tried


def test_no_verb_prints_a_control_code_or_takes_data_for_markup(outputs):
    wrong = {}
    for name, text in outputs:
        plain = STYLES.sub("", text).replace("\r\n", "\n").replace("\r", "")
        problems = sorted({printable(found) for found in UNPRINTABLE.findall(plain)})
        problems += [
            word for word in ("Traceback", "MarkupError", "link=http://evil.example\x1b") if word in text
        ]
        if name not in TEXT_BLOCKS and re.search("^FORGED", plain, re.MULTILINE):
            problems.append("a line of its own")
        if problems:
            wrong[name] = (problems, plain[-600:])
    assert wrong == {}


def test_hostile_text_is_shown_and_not_dropped(outputs):
    plain = [(name, STYLES.sub("", text)) for name, text in outputs]
    shown = {name for name, text in plain if "\\x1b]52;c;ZXZpbA==" in text and "[/oops]" in text}
    assert {"record ls", "record show", "why", "open", "record archive", "doctor"} <= shown


def test_a_template_styles_its_own_text_and_leaves_data_alone():
    text = styled("[bold]{}[/bold] of {:,} [dim]{!r}[/dim]", "[/bold][red]x", 12345, "a\nb")
    assert text.plain == "[/bold][red]x of 12,345 'a\\nb'"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(0, 13, "bold"), (24, 30, "dim")]
    nested = styled("{} and {}", styled("[red]no[/red]"), "\x1b\n[/]")
    assert (nested.plain, [str(span.style) for span in nested.spans]) == ("no and \\x1b [/]", ["red"])

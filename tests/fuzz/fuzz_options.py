"""What a user or a file writes as text: filters, names of files."""

import os
import random
from pathlib import Path

from areal_core.safety.file_names import UnsafeName, checked_name, open_below
from replayer.errors import WrongFilter
from replayer.expression import ROW_NAMES, parse_expression

from .fuzz_records import OBEYED
from .inputs import Case, Edit, Files
from .targets import Target

# Filters

ATOMS = [
    *("1", "0", "-1", "2.5", "1e308", "10**9", "'a'", "''", "True", "None", "[1, 2]", "()", "9" * 400),
    *("0x" + "f" * 300, *ROW_NAMES),
]
FORMS = [
    *("({} + {})", "({} * {})", "({} - {})", "{} // {}", "{} % {}", "{} / {}", "{} ** {}", "{} < {} < {}"),
    *("{} in {}", "{} == {}", "not {}", "-{}", "{}[{}]", "len({})", "round({}, {})", "round({})", "sum({})"),
    *("max({}, {})", "abs({})", "min({})", "({} and {})", "({} or {})", "[{}, {}]", "{}.real"),
    *("(lambda: {})()", "{}[{}:{}]", "f'{{{}}}'", "{}({})", "({} if {} else {})"),
]
ROW = {
    "reward": 1.0,
    "prompt": [5, 6],
    "completion": [7, 8, 9],
    "prompt_text": "ab",
    "completion_text": "cde",
    "finish_reason": "stop",
    "logprobs": [-0.5, -1.0, float("-inf")],
    "versions": [0, 0, 1],
    "prompt_id": 3,
    "sample_id": 0,
    "step": 7,
}


def filter_bases(folder: Path) -> dict[str, Files]:
    texts = [
        "reward > 0 and len(completion) < 512",
        "sum(logprobs) / len(logprobs) < -1",
        "round(reward, 2) == 1",
    ]
    return {f"filter {number}": {"filter": text.encode()} for number, text in enumerate(texts)}


def filter_edit(chance: random.Random) -> Edit:
    text = chance.choice(ATOMS)
    for _ in range(chance.randrange(1, 12)):
        form = chance.choice(FORMS)
        holes = [
            text if number == 0 else chance.choice(ATOMS)
            for number in range(form.count("{}") + form.count("{{{}}}"))
        ]
        text = form.format(*holes) if len(text) < 3000 else text
    if chance.random() < 0.05:
        return [
            "repeat",
            "filter",
            chance.choice(["(", "-", "not ", "1+", "[", "abs("]),
            chance.choice([50, 500, 20_000]),
            "1",
        ]
    return ["text", "filter", text]


def run_filter(case: Case, box: Path) -> None:
    text = case.files["filter"].decode("utf-8", "surrogateescape")
    parse_expression(text, ROW_NAMES).matches(ROW)


# Names of files

PIECES = [
    *("..", ".", "", "a", "steps", "x" * 256, "\x00", "\n", "\x1b", "\u202e", "\\", "/", "~", "C:", " ", "é"),
    *("\ud800", "link", "a.b"),
]


def run_name(case: Case, box: Path) -> None:
    """An accepted name leaves its folder neither by its parts nor through a link."""
    name = case.files["name"].decode("utf-8", "surrogateescape")
    folder = box / "record"
    folder.mkdir()
    (box / "outside").mkdir()
    (box / "outside" / "x").write_text("secret")
    (folder / "link").symlink_to("../outside")
    checked = checked_name(name, "the fuzzer")
    assert checked == name
    joined = os.path.normpath(os.path.join(folder, name))
    assert joined.startswith(f"{folder}{os.sep}")
    assert joined == os.path.join(folder, name)
    assert not OBEYED.search(name)
    real = Path(os.path.realpath(joined))
    try:
        os.close(open_below(folder, name, os.O_RDWR | os.O_CREAT))
    except OSError:
        return  # no such folder
    assert real.is_relative_to(folder)
    assert real.is_file()


TARGETS = {
    "expression": Target(filter_bases, run_filter, (WrongFilter,), filter_edit),
    "names": Target(
        lambda _: {name: {"name": name.encode()} for name in ("steps/000001/step.json", "a", "a/b/c")},
        run_name,
        (UnsafeName,),
        lambda chance: ["text", "name", "/".join(chance.choices(PIECES, k=chance.choice([1, 2, 3, 5, 20])))],
    ),
}

"""What `hang diagnose` answers to every case at hand, and how often each confidence is right.

    python -m benchmarks.hang_calibration [--verbose] [--write]

Own cases are texts under tests/hangdoctor/analysis (`field/*.txt` in the short notation below,
`cases/*.txt` as pastes). A case that has all ranks of its job is scored a second time as a
collection of two samples in which nothing moved: one sample alone is never certain. `--write` puts
the table into docs/verbs/hang.md.

    ##### TITLE | LABEL | OTHER ACCEPTABLE LABELS | WORLD SIZE
    0,2-3: FRAME < FRAME       a main thread, innermost frame first; names work as well as ranks
    + NAME: FRAME < FRAME      another thread of the same processes
    0: * FRAME                 the dump saw it run
    1: ? TEXT                  what py-spy said instead of a stack
    log 0: TEXT                a line of the log of that rank
"""

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness import read_options
from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

ROOT = Path(__file__).parents[1]
OWN = ROOT / "tests/hangdoctor/analysis"
GOALS = {"high": 0.97, "medium": 0.85, "low": 0.60}
TABLE = re.compile(r"(?<=<!-- calibration -->\n).*?(?=<!-- end -->)", re.S)


@dataclass(frozen=True)
class Case:
    """Files as a user has them, and the labels that are right for them."""

    title: str
    source: str
    label: str
    accept: tuple[str, ...]
    world_size: int | None
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The diagnosis of one case."""

    case: Case
    label: str
    confidence: str

    @property
    def right(self) -> bool:
        """True for the established label and for others that the visible evidence supports."""
        return self.label in (self.case.label, *self.case.accept)


def own_cases(folder: Path = OWN) -> Iterator[Case]:
    """Yield the cases of `folder`: those in short notation, where possible twice, then pastes."""
    for path in sorted(folder.glob("field/*.txt")):
        for title, label, accept, world, body in blocks(path):
            case = Case(
                title, path.stem.replace("_", " "), label, tuple(accept.split()), world, files_of(body)
            )
            yield from (made for made in (case, still(case)) if made)
    for path in sorted(folder.glob("cases/*.txt")):
        for title, label, _, world, body in blocks(path):
            yield Case(title, "pastes", label, (), world, {"stacks.txt": body})


def blocks(path: Path) -> Iterator[tuple[str, str, str, int | None, str]]:
    """Yield title, label, third field, world size and body of each case of a file."""
    for block in path.read_text().split("##### ")[1:]:
        head, body = block.split("\n", 1)
        title, label, third, *world = [cell.strip() for cell in head.split("|")]
        numbers = re.findall(r"\d+", world[0]) if world else []
        yield title, label, third, int(numbers[0]) if numbers else None, body


def files_of(body: str) -> dict[str, str]:
    """Return the py-spy texts and logs of a case in short notation, by file name."""
    files: dict[str, str] = {}
    names: list[str] = []
    for line in body.strip().splitlines():
        head, text = line.split(": ", 1)
        if head.startswith("log "):
            file = f"rank_{head[4:]}.log"
            files[file] = files.get(file, "") + text + "\n"
            continue
        if not head.startswith("+ "):
            names = process_names(head)
        for name in names:
            files[f"{name}.txt"] = files.get(f"{name}.txt", "") + text_of(head, text, name)
    return files


def still(case: Case) -> Case | None:
    """Return a case as a collection of two equal samples, half a minute apart; None where a rank of
    the job is not among its files.
    """
    stacks = {name: text for name, text in case.files.items() if name.endswith(".txt")}
    ranks = [name for name in stacks if re.fullmatch(r"rank_\d+\.txt", name)]
    if (
        case.world_size != len(ranks)
        or len(ranks) != len(stacks)
        or any("Error" in t for t in stacks.values())
    ):
        return None
    processes = [
        {"name": name[:-4], "rank": int(name[5:-4]), "role": "trainer", "host": "a", "pid": 10, "parent": None,
         "status": "dumped", "detail": "", "command": ""}
        for name in ranks
    ]  # fmt: skip
    contents = {
        "format": "hangdoctor-collection",
        "version": 1,
        "world_size": len(ranks),
        "hosts": [],
        "samples": [{"time": 100.0}, {"time": 130.0}],
        "processes": processes,
    }
    files = {f"samples/{sample}/{name}": text for sample in range(2) for name, text in stacks.items()}
    files |= {f"logs/{name}": text for name, text in case.files.items() if name.endswith(".log")}
    source = f"{case.source}, two samples"
    return replace(case, source=source, files=files | {"collection.json": json.dumps(contents)})


def process_names(head: str) -> list[str]:
    """Map `0,2-3` to rank_0, rank_2, rank_3; any other text is a name itself."""
    if not re.fullmatch(r"[\d,-]+", head):
        return [head]
    spans = [span.split("-") for span in head.split(",")]
    return [f"rank_{rank}" for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def text_of(head: str, text: str, name: str) -> str:
    """Return one thread as py-spy prints it, or the refusal."""
    if text.startswith("? "):
        return text[2:] + "\n"
    pid = 1000 + sum(map(ord, name))
    other = head.startswith("+ ")
    thread = head[2:] if other else "MainThread"
    state = "active" if text.startswith("*") else "idle"
    frames = "".join(f"    {shown(frame)}\n" for frame in text.lstrip("* ").split(" < "))
    header = "" if other else f"Process {pid}: python {name}.py\nPython v3.11.9 (/usr/bin/python3.11)\n\n"
    return f'{header}Thread {pid + len(text) * other} ({state}): "{thread}"\n{frames}'


def shown(frame: str) -> str:
    """Map `func@file:line` to py-spy's `func (file:line)`."""
    function, file = frame.strip().rsplit("@", 1)
    return f"{function} ({file})"


def answer(case: Case) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in case.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        diagnosis = diagnose(read_snapshot([Path(folder)], case.world_size))
    return Answer(case, diagnosis.label, diagnosis.confidence)


def calibration(answers: list[Answer]) -> dict[str, tuple[int, int]]:
    """Return (right, all) for each confidence."""
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    for given in answers:
        counts[given.confidence][given.right] += 1
    return {level: (counts[level][True], counts[level].total()) for level in GOALS}


def table(answers: list[Answer]) -> str:
    """Return the markdown table of docs/verbs/hang.md."""
    sources = sorted({given.case.source for given in answers})
    lines = ["| cases | acceptable | exact | high | medium | low |", "|---|---|---|---|---|---|"]
    for source in [*sources, "all"]:
        chosen = [given for given in answers if source in (given.case.source, "all")]
        right = sum(given.right for given in chosen)
        exact = sum(given.label == given.case.label for given in chosen)
        levels = " | ".join(f"{good} of {of}" for good, of in calibration(chosen).values())
        lines.append(f"| {source} | {right} of {len(chosen)} | {exact} | {levels} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = read_options(__doc__, write=False, verbose=False)
    answers = [answer(case) for case in own_cases()]
    if options.verbose:
        for given in answers:
            if not given.right:
                print(
                    f"{given.case.source}: {given.case.title}: {given.label} {given.confidence}, want {given.case.label}"
                )
    print(table(answers))
    if options.write:
        page = ROOT / "docs/verbs/hang.md"
        page.write_text(TABLE.sub(lambda _: table(answers), page.read_text()))


if __name__ == "__main__":
    main()

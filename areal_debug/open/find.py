"""Find what a run left below its folder: records, metrics, traces, collections, reports.

Only names and, of reports, the first bytes are read here. Links are not followed, and nothing below
a record, a collection or a checkpoint is searched.
"""

import contextlib
import itertools
import json
import os
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

from areal_core.safety.received import open_received, read_received
from areal_debug.doctor.rows import is_record

MAX_ENTRIES = 200_000  # files and folders
MAX_DEPTH = 16
MAX_REPORT_BYTES = 8_000_000
METRICS = re.compile(r"stats\.jsonl|metrics\.jsonl|trainer_state\.json|events\.out\.tfevents\..*")
RANK_FILE = re.compile(r"rank-[0-9]+\.jsonl")
PAGE_OF_OURS = re.compile(r'<meta name="areal-debug" content="([a-z-]{1,20}): ([^"]{0,60})">')
HEAD_BYTES = 4096
METRICS_KEY = "*metrics*"  # no name of a file that is found by itself
# What the JSON of a verb has on its top level.
REPORTS = {
    "why": {"verdict", "cause", "pattern", "next"},
    "diff": {"verdict", "differences", "num_shared"},
    "crosscheck": {"verdict", "opinions", "first_stage"},
    "consistency": {"verdict", "causes", "metrics"},
    "doctor": {"verdict", "alarms", "judged"},
    "hang": {"label", "confidence", "culprit_ranks"},
}
HANG_VERDICTS = {"straggler_or_not_hung": "not hung", "unknown": "unknown"}


@dataclass(frozen=True)
class Found:
    """Something that a run left.

    Args:
        kind: "record", "metrics", "trace", "hang", "health", "checkpoint" or "report".
        path: the folder or file.
        name: its path below the run's folder.
        verb: of a report: the verb that wrote it.
        verdict: of a report: what it says.
    """

    kind: str
    path: Path
    name: str
    verb: str = ""
    verdict: str = ""


def find(run: Path) -> tuple[list[Found], str]:
    """Return what is found, in the order of names, and a note on what was not searched.

    Raises ValueError if `run` does not exist.
    """
    if not run.exists():
        raise ValueError(f"{run} does not exist: give the folder of a run, or a record")
    found: dict[Path, Found] = {}
    left = MAX_ENTRIES
    folders = [(run, 0)] if run.is_dir() else []
    if (first := recognised(run)) is not None:
        add(found, first, run, run.absolute().name)
        folders = []
    while folders and left > 0:
        folder, depth = folders.pop()
        for entry in sorted_entries(folder):
            left -= 1
            path, name = Path(entry.path), str(Path(entry.path).relative_to(run))
            if entry.is_symlink():
                continue
            kind = recognised(path)
            metrics = path / "trainer_state.json" if kind == "checkpoint" else path
            if METRICS.fullmatch(metrics.name) and metrics.is_file():
                add_metrics(found, metrics, run)
            if kind is not None:
                add(found, kind, path, name)
            elif entry.is_dir():
                folders += [(path, depth + 1)] if depth < MAX_DEPTH else []
            elif path.suffix in (".html", ".json") and (report := report_at(path)) is not None:
                found[path] = Found("report", path, name, *report)
    note = "" if left > 0 else f"only the first {MAX_ENTRIES:,} files were searched"
    return sorted(found.values(), key=lambda one: one.name), note


def add(found: dict[Path, Found], kind: str, path: Path, name: str) -> None:
    """Add what was recognised; the rows of a record are metrics, too."""
    found[path] = Found(kind, path, name)
    if kind == "record":
        found[path / METRICS_KEY] = Found("metrics", path, name)


def sorted_entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def recognised(path: Path) -> str | None:
    """Return what kind of thing a path is, by the names in it; None for anything else."""
    if path.is_file():
        if path.name == "server_health.json":
            return "health"
        if path.name.endswith((".tar.gz", ".tgz")):
            return "hang"
        return "record" if path.suffix == ".zip" and is_record(path) else None
    names = {entry.name for entry in sorted_entries(path)}
    if {"record.json", "zarr.json"} & names:
        return "record"
    if "collection.json" in names:
        return "hang"
    if any(RANK_FILE.fullmatch(name) for name in names):
        return "trace"
    is_checkpoint = any(name.endswith((".safetensors", ".distcp")) for name in names)
    return "checkpoint" if is_checkpoint else None


def add_metrics(found: dict[Path, Found], file: Path, run: Path) -> None:
    from areal_debug.doctor.sources.locate import run_of

    key = run_of(file) / METRICS_KEY
    if key not in found or found[key].path.stat().st_mtime_ns < file.stat().st_mtime_ns:
        found[key] = Found("metrics", file, str(file.relative_to(run)))


def report_at(file: Path) -> tuple[str, str] | None:
    """Return the verb and the verdict of a report that a verb wrote, None for any other file."""
    try:
        if file.suffix == ".html":
            with open_received(file) as page:
                found = PAGE_OF_OURS.search(page.read(HEAD_BYTES).decode("utf-8", "replace"))
            return (found[1], unescape(found[2])) if found else None
        document = read_document(file)
    except (OSError, ValueError, RecursionError):
        return None
    for verb, keys in REPORTS.items():
        if keys <= set(document):
            label = str(document.get("label"))
            return verb, HANG_VERDICTS.get(label, "hung") if verb == "hang" else str(document["verdict"])
    return None


def read_document(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one for other JSON. Raises UnreadableFile for a large file."""
    document = json.loads(read_received(file, MAX_REPORT_BYTES))
    return document if isinstance(document, dict) else {}


def fingerprint(run: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every file, whose content is not read."""
    files = itertools.chain([run], (Path(top, name) for top, _, names in os.walk(run) for name in names))
    found = []
    for file in itertools.islice(files, MAX_ENTRIES):
        with contextlib.suppress(OSError):  # it may be gone
            facts = file.lstat()
            found.append((str(file), facts.st_size, facts.st_mtime_ns))
    return found

"""Recorded steps as tests: a pytest plugin that replays a record and fails where the code's numbers are not the recorded ones.

    @pytest.mark.replay("tests/records/tiny_grpo.zip", steps=(0, 3))
    def test_training_gives_the_recorded_numbers(replay_record, tiny_model):
        replay_record(model=tiny_model)

Nothing is ever generated unless asked with `--areal-record`. This file loads with every pytest: it imports neither torch nor zarr; what a
test needs is imported when it replays (`areal_debug.regression`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from replayer.check import ReplayReport

MODES = {
    "none": "replay or fail, never generate (the default)",
    "once": "generate records that are missing, with the mark's run=[...]",
    "all": "generate all records anew, with the mark's run=[...]",
    "rewrite": "train again on the recorded rollouts, keep the new numbers, and show what changed",
}
MARK = 'replay("path", steps=(first, last), exact=False, model="folder", run=["script.py", ...]): a record to replay'


@dataclass
class Session:
    """What the plugin learned in a session. `used` are the records that collected tests name."""

    mode: str
    used: set[Path] = field(default_factory=set)
    num_steps: int = 0
    replayed: set[Path] = field(default_factory=set)
    stale: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    written: dict[Path, list[str]] = field(default_factory=dict)


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, and where records lie."""
    group = parser.getgroup("areal-debug")
    modes = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    group.addoption("--areal-record", choices=list(MODES), default="none", help=modes)
    parser.addini(
        "areal_records", "Folders in which unused records are looked for.", "paths", ["tests/records"]
    )


def pytest_configure(config: pytest.Config) -> None:
    """The mark, and a place for what is learned."""
    config.addinivalue_line("markers", MARK)
    config.stash[SESSION] = Session(config.getoption("--areal-record"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Notes which record a test names, also when the test is left out afterwards."""
    for mark in item.iter_markers("replay"):
        if mark.args:
            item.config.stash[SESSION].used.add(place_of(item.config, mark.args[0]))


def place_of(config: pytest.Config, path: str) -> Path:
    """A record's place; relative ones count from pytest's root."""
    return (config.rootpath / path).resolve()


@pytest.fixture
def replay_record(request: pytest.FixtureRequest) -> Callable[..., "ReplayReport"]:
    """A function that replays the record of the test's mark and fails where it differs; its arguments override the mark's.

    Returns the judged `replayer.check.ReplayReport`.
    """

    def replay(**arguments: Any) -> "ReplayReport":
        from areal_debug.regression import RegressionError, Spec, hold

        __tracebackhide__ = True
        mark = request.node.get_closest_marker("replay")
        if mark is None or not mark.args:
            pytest.fail('the test lacks its mark: @pytest.mark.replay("path of a record")', pytrace=False)
        session = request.config.stash[SESSION]
        place = place_of(request.config, mark.args[0])
        try:
            held = hold(Spec(place, request.node.nodeid, **{**mark.kwargs, **arguments}), session.mode)
        except RegressionError as error:
            pytest.fail(str(error), pytrace=False)
        session.replayed.add(place)
        session.num_steps += len(held.report.steps)
        if held.stale:
            session.stale[place] = held.stale
        if held.changes is not None:
            session.written[place] = held.changes
        return held.report

    return replay


def find_records(folder: Path) -> Iterator[Path]:
    """Records and archives under a folder."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix == ".zip" or (path / "record.json").is_file() or (path / "zarr.json").is_file():
            yield path.resolve()
        elif path.is_dir():
            yield from find_records(path)


def unused_records(config: pytest.Config) -> list[Path]:
    """Records that no test names; nothing can be said where only some of the tests were collected."""
    if config.args_source == pytest.Config.ArgsSource.ARGS:
        return []
    found = [
        path for folder in config.getini("areal_records") for path in find_records(config.rootpath / folder)
    ]
    return [path for path in found if path not in config.stash[SESSION].used]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was replayed, what was written and how it changed, what is stale, what is unused."""
    session = config.stash[SESSION]
    unused = unused_records(config)
    if not (session.replayed or session.written or unused):
        return

    def name(path: Path) -> str:
        return str(path.relative_to(config.rootpath)) if path.is_relative_to(config.rootpath) else str(path)

    tell = terminalreporter.write_line
    terminalreporter.section("records", sep="-")
    tell(f"{session.num_steps} steps of {len(session.replayed)} records replayed")
    for path, changes in session.written.items():
        tell(f"{name(path)} is written anew:" if changes else f"{name(path)} is unchanged")
        for line in changes:
            tell(f"  {line}")
    for path, reasons in session.stale.items():
        tell(f"{name(path)} is stale, judged by noise and not by bits: {'; '.join(reasons)}")
        tell("  --areal-record=rewrite records it for this machine")
    for path in unused:
        tell(f"{name(path)} is unused: no test names it")

"""Recorded steps as tests: replay a record with pytest and fail if the numbers differ.

    @pytest.mark.replay("tests/records/tiny_grpo.zip", steps=(0, 3))
    def test_training_reproduces_the_record(replay_record, tiny_model):
        replay_record(model=tiny_model)

Nothing is generated without `--areal-record`. Every pytest loads this module, so it imports neither
torch nor zarr; a test imports what it needs when it replays (`areal_debug.regression`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.safety.printable import printable_block

if TYPE_CHECKING:
    from replayer.check import ReplayReport

MODES = {
    "none": "replay or fail, never generate (the default)",
    "once": "generate records that are missing, with the mark's run=[...]",
    "all": "generate all records again, with the mark's run=[...]",
    "rewrite": "train again on the recorded rollouts, store the new numbers, and print what changed",
}
MARK = 'replay("path", steps=(first, last), exact=False, model="folder", run=["script.py", ...]): a record to replay'


@dataclass
class Session:
    """The state of the plugin in a session. `used` are the records that collected tests name."""

    mode: str
    used: set[Path] = field(default_factory=set)
    num_steps: int = 0
    replayed: set[Path] = field(default_factory=set)
    stale: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    written: dict[Path, list[str]] = field(default_factory=dict)


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, and the setting for the folders of records."""
    group = parser.getgroup("areal-debug")
    modes = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    group.addoption("--areal-record", choices=list(MODES), default="none", help=modes)
    parser.addini(
        "areal_records", "Folders that are searched for unused records.", "paths", ["tests/records"]
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and create the state."""
    config.addinivalue_line("markers", MARK)
    config.stash[SESSION] = Session(config.getoption("--areal-record"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note which record a test names, even if the test is deselected later."""
    for mark in item.iter_markers("replay"):
        if mark.args:
            item.config.stash[SESSION].used.add(place_of(item.config, mark.args[0]))


def place_of(config: pytest.Config, path: str) -> Path:
    """Return a record's path; relative paths start at pytest's root."""
    return (config.rootpath / path).resolve()


@pytest.fixture
def replay_record(request: pytest.FixtureRequest) -> Callable[..., "ReplayReport"]:
    """A function that replays the record of the test's mark and fails if it differs.

    Its arguments override those of the mark. It returns the judged `replayer.check.ReplayReport`.
    """

    def replay(**arguments: Any) -> "ReplayReport":
        from areal_debug.regression import RegressionError, Spec, check_spec

        __tracebackhide__ = True
        mark = request.node.get_closest_marker("replay")
        if mark is None or not mark.args:
            pytest.fail('the test lacks its mark: @pytest.mark.replay("path of a record")', pytrace=False)
        session = request.config.stash[SESSION]
        place = place_of(request.config, mark.args[0])
        try:
            checked = check_spec(
                Spec(place, request.node.nodeid, **{**mark.kwargs, **arguments}), session.mode
            )
        except RegressionError as error:
            pytest.fail(printable_block(str(error)), pytrace=False)
        session.replayed.add(place)
        session.num_steps += len(checked.report.steps)
        if checked.stale:
            session.stale[place] = checked.stale
        if checked.changes is not None:
            session.written[place] = checked.changes
        return checked.report

    return replay


def find_records(folder: Path) -> Iterator[Path]:
    """Yield the records and archives under a folder."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix == ".zip" or (path / "record.json").is_file() or (path / "zarr.json").is_file():
            yield path.resolve()
        elif path.is_dir():
            yield from find_records(path)


def unused_records(config: pytest.Config) -> list[Path]:
    """Return records that no test names; empty if only some of the tests were collected."""
    if config.args_source == pytest.Config.ArgsSource.ARGS:
        return []
    found = [
        path for folder in config.getini("areal_records") for path in find_records(config.rootpath / folder)
    ]
    return [path for path in found if path not in config.stash[SESSION].used]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was replayed, what was written and how it changed, and stale or unused records."""
    session = config.stash[SESSION]
    unused = unused_records(config)
    if not (session.replayed or session.written or unused):
        return

    def name(path: Path) -> str:
        return str(path.relative_to(config.rootpath)) if path.is_relative_to(config.rootpath) else str(path)

    write = terminalreporter.write_line
    terminalreporter.section("records", sep="-")
    write(f"{session.num_steps} steps of {len(session.replayed)} records replayed")
    for path, changes in session.written.items():
        write(f"{name(path)} was rewritten:" if changes else f"{name(path)} is unchanged")
        for line in changes:
            write(f"  {line}")
    for path, reasons in session.stale.items():
        write(
            f"{name(path)} is stale, compared with the noise floor and not bit by bit: {'; '.join(reasons)}"
        )
        write("  --areal-record=rewrite records it for this machine")
    for path in unused:
        write(f"{name(path)} is unused: no test names it")

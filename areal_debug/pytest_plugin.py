"""Recorded steps as tests: replay a record with pytest and fail if the numbers differ.

    @pytest.mark.replay("tests/records/tiny_grpo.zip", steps=(0, 3))
    def test_training_reproduces_the_record(replay_record, tiny_model):
        replay_record(model=tiny_model)

Nothing is generated without `--areal-record`. Every pytest loads this module, so it imports neither
torch nor zarr; a test imports what it needs when it replays (`areal_debug.regression`).

    test ─> ReplayedRecord ─> its report ─(pytest-xdist: from a worker)─> Session of the process that prints
    collection ─> records that tests name ─(the end of a worker)─┘
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.safety.printable import printable_block

if TYPE_CHECKING:
    from areal_core.launch.warm import WarmRanks
    from replayer.check import ReplayReport

MODES = {
    "none": "replay or fail, never generate (the default)",
    "once": "generate records that are missing, with the mark's run=[...]",
    "all": "generate all records again, with the mark's run=[...]",
    "rewrite": "train again on the recorded rollouts, store the new numbers, and print what changed",
}
MARK = 'replay("path", steps=(first, last), exact=False, model="folder", run=["script.py", ...], code="own_loss.py"): a record to replay'


@dataclass(frozen=True)
class ReplayedRecord:
    """A record that a test replayed: what the summary prints of it.

    `changes` of a record that was written, None if none was; `stale` are the reasons why it was
    compared with the noise floor.
    """

    record: str
    num_steps: int
    stale: list[str]
    changes: list[str] | None


@dataclass
class Session:
    """The state of the plugin in a session.

    `named` are the records of the tests collected so far; `used` those of all tests, None if they
    are not known. `cleanup` ends the process that replays.
    """

    mode: str
    named: set[Path] = field(default_factory=set)
    used: set[Path] | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)
    started: "tuple[WarmRanks, object] | None" = None

    def ranks(self) -> "WarmRanks":
        """Return the process whose forks run the replays of the tests; the first one starts it.

        A test that changes the current folder or the environment gets a new one: libraries read
        some variables once.
        """
        from areal_debug.replay.ranks import replay_ranks

        wanted = Path.cwd(), {name: os.environ[name] for name in os.environ if name != CURRENT_TEST}
        if self.started is None or self.started[1] != wanted:
            self.cleanup.close()
            self.started = self.cleanup.enter_context(replay_ranks()), wanted
        return self.started[0]


SESSION = pytest.StashKey[Session]()
REPLAYED = pytest.StashKey[list[ReplayedRecord]]()  # of a test
ATTRIBUTE = "areal_debug_replayed"  # of a report: a list of `ReplayedRecord` as dicts
WORKER_OUTPUT = "areal_debug_used"  # of a worker of pytest-xdist, if it knows `Session.used`
CURRENT_TEST = "PYTEST_CURRENT_TEST"  # a variable that pytest sets in each test
PARTIAL = ("ignore", "ignore_glob", "lf")  # options with which not all files are collected


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
            item.config.stash[SESSION].named.add(place_of(item.config, mark.args[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which records are used, if every file could be imported."""
    if not session.testsfailed:  # a file that cannot be imported may name any record
        session.config.stash[SESSION].used = session.config.stash[SESSION].named


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the process that replays; in a worker of pytest-xdist, send which records are used."""
    session.config.stash[SESSION].cleanup.close()
    output = getattr(session.config, "workeroutput", None)
    used = session.config.stash[SESSION].used
    if output is not None and used is not None:
        output[WORKER_OUTPUT] = [str(path) for path in used]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker of pytest-xdist sent; one that crashed has sent nothing."""
    output = getattr(node, "workeroutput", {})
    if WORKER_OUTPUT in output:
        session = node.config.stash[SESSION]
        session.used = {*(session.used or ()), *map(Path, output[WORKER_OUTPUT])}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Attach what a test replayed to its report, which pytest-xdist sends like any other."""
    report = yield
    if call.when == "call":
        setattr(report, ATTRIBUTE, [asdict(one) for one in item.stash.get(REPLAYED, [])])
    return report


def place_of(config: pytest.Config, path: str) -> Path:
    """Return a record's path; relative paths start at pytest's root."""
    return (config.rootpath / path).resolve()


@pytest.fixture
def assert_invariant() -> Callable[..., None]:
    """Return `replayer.invariance.assert_invariant`, for a step function of any trainer."""
    from replayer.invariance import assert_invariant

    return assert_invariant


@pytest.fixture
def replay_record(request: pytest.FixtureRequest) -> Callable[..., "ReplayReport"]:
    """A function that replays the record of the test's mark and fails the test if it differs.

    Its arguments override those of the mark, `@pytest.mark.replay(PATH, ...)`: `steps`, the first
    and the last or one, all by default; `exact`, to require the recorded bits on another machine,
    too; `model`, the folder of the run's first model, if it has moved; `run`, the arguments of
    `areal-debug train` that generate the record; `code`, the file or folder with the run's own
    loss, advantage or objective. It returns the `replayer.ReplayReport`, with a
    verdict.
    """

    def replay(**arguments: Any) -> "ReplayReport":
        from areal_debug.regression import RegressionError, Spec, check_spec

        __tracebackhide__ = True
        mark = request.node.get_closest_marker("replay")
        if mark is None or not mark.args:
            pytest.fail('the test lacks its mark: @pytest.mark.replay("path of a record")', pytrace=False)
        session = request.config.stash[SESSION]
        place = place_of(request.config, mark.args[0])
        given = {**mark.kwargs, **arguments}
        if "code" in given:
            given["code"] = place_of(request.config, given["code"])
        spec = Spec(place, request.node.nodeid, root=request.config.rootpath, **given)
        checked, failure = None, ""
        try:
            checked = check_spec(spec, session.mode, session.ranks)
        except RegressionError as error:
            failure = printable_block(str(error))
        if checked is None:  # outside of the handler, else pytest prints both exceptions
            pytest.fail(failure, pytrace=False)
        name = shown_path(request.config, place)
        replayed = ReplayedRecord(name, len(checked.report.steps), list(checked.stale), checked.changes)
        request.node.stash.setdefault(REPLAYED, []).append(replayed)
        return checked.report

    return replay


def find_records(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_symlink() and path.is_dir():  # which may lead to a folder above
            continue
        if path.suffix == ".zip" or (path / "record.json").is_file() or (path / "zarr.json").is_file():
            yield path.resolve()
        elif path.is_dir():
            yield from find_records(path)


def unused_records(config: pytest.Config) -> list[Path]:
    """Return records that no test names; empty if only some of the tests were collected."""
    used = config.stash[SESSION].used
    partial = any(config.getoption(name, None) for name in PARTIAL)  # the cache may be off
    if config.args_source == pytest.Config.ArgsSource.ARGS or partial or used is None:
        return []
    found = [
        path for folder in config.getini("areal_records") for path in find_records(config.rootpath / folder)
    ]
    return [path for path in found if path not in used]


def shown_path(config: pytest.Config, path: Path) -> str:
    return str(path.relative_to(config.rootpath)) if path.is_relative_to(config.rootpath) else str(path)


def replayed_records(reports: Iterable[Any]) -> list[ReplayedRecord]:
    """Return what tests replayed, one of each record: steps are added, changes are joined."""
    found: dict[str, ReplayedRecord] = {}
    for one in (ReplayedRecord(**facts) for report in reports for facts in getattr(report, ATTRIBUTE, [])):
        if one.record in found:
            before = found[one.record]
            changes = (
                None
                if before.changes is one.changes is None
                else [*(before.changes or []), *(one.changes or [])]
            )
            one = replace(one, num_steps=before.num_steps + one.num_steps, changes=changes)
        found[one.record] = one
    return list(found.values())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was replayed, what was written and how it changed, and stale or unused records."""
    replayed = replayed_records(report for reports in terminalreporter.stats.values() for report in reports)
    unused = unused_records(config)
    if not (replayed or unused):
        return
    write = terminalreporter.write_line
    terminalreporter.section("records", sep="-")
    write(
        f"{sum(one.num_steps for one in replayed)} steps of {len(replayed)} record{'s' * (len(replayed) != 1)} replayed"
    )
    for one in replayed:
        if one.changes is not None:
            write(f"{one.record} was written:" if one.changes else f"{one.record} is unchanged")
            for line in one.changes:
                write(f"  {line}")
        if one.stale:
            reasons = "; ".join(one.stale)
            write(f"{one.record} is stale, compared with the noise floor and not bit by bit: {reasons}")
            write("  --areal-record=rewrite records it for this machine")
    for path in unused:
        write(f"{shown_path(config, path)} is unused: no test names it")

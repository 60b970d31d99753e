"""Every interleaving, kill and power failure of small runs keeps what the commit protocol states.

The real functions run on a simulated disk (`disk.py`); each test prints how many states it visited.
"""

import os
from unittest import mock

import pytest

import recorder.archive.live_archive as live_archive
import recorder.header as header
import recorder.resume as resume
import recorder.retention as retention
import recorder.step_files as step_files
import recorder.tensors as tensors
import recorder.writer as writing
from recorder.archive.live_archive import LiveArchive
from recorder.format import RankFiles
from recorder.retention import KeptSteps

from .disk import ROOT, Disk
from .explore import Explorer, Violation, holders
from .processes import (
    Simulation,
    archived_step,
    archiving,
    begun,
    read_record,
    reading,
    recording,
    value_of,
    whole_run,
)


def check_read(found, committed, run, num_ranks):
    """Raise Violation unless committed steps are whole, or removed by the limits, and no others."""
    if found is None:
        if committed:
            raise Violation(f"steps {committed} are lost with their record")
        return
    values, gaps, problems = found
    for step, read in values.items():
        if run is not None and read != [value_of(run, step, rank) for rank in range(num_ranks)]:
            raise Violation(f"step {step} reads as {read}")
    if lost := {step for step in committed - set(values) if "removed" not in (gaps.reason(step) or "")}:
        raise Violation(f"committed steps {lost} are lost")
    if damage := [str(problem) for problem in problems if problem.kind == "damaged"]:
        raise Violation(f"verify finds {damage}")


def read_or_violate(simulation, disk):
    try:
        return simulation.machine.on(disk, read_record)[0]
    except ValueError as error:
        raise Violation(f"a reader fails: {error}") from None


def committed_in(marks):
    return {mark[2] for mark in marks if mark[1] == "committed"}


def report(name, result):
    print(f"{name}: {result.states} states, {result.crashes} disks after a power failure")
    return result


def explore_ranks(num_ranks, num_steps, keep_last, max_kills=0, with_reader=False):
    """The ranks of one run, with power failures and kills at every operation."""
    simulation = Simulation()

    def check_crash(disk, marks):
        check_read(read_or_violate(simulation, disk), committed_in(marks), 0, num_ranks)

    def check_end(world, outcomes):
        if with_reader and outcomes[-1].startswith("WRONG"):
            raise Violation(outcomes[-1])
        check_crash(world.disk, world.marks)
        if not max_kills and (failed := [outcome for outcome in outcomes if "Error" in str(outcome)]):
            raise Violation(f"a process fails: {failed}")
        gone = {mark[2] for mark in world.marks if mark[1] == "unreadable"}
        if not max_kills and gone - set(range(num_steps - (keep_last or num_steps))):
            raise Violation(f"a reader could not read steps {gone}")

    with simulation.installed():
        disk = begun(simulation, num_ranks)
        steps = range(num_steps)
        bodies = [recording(simulation, rank, num_ranks, steps, keep_last) for rank in range(num_ranks)]
        if with_reader:
            bodies.append(reading(simulation, num_ranks, num_ranks))
        explorer = Explorer(
            simulation.machine,
            bodies,
            check_crash=None if with_reader else check_crash,
            check_end=check_end,
            max_kills=max_kills,
        )
        return explorer.run(disk)


CHANGES = frozenset({"mkdir", "create", "rename", "unlink", "rmdir"})


def explore_runs(disk_of, bodies_of, max_kills, silent=""):
    """Runs that compete for one folder. With `silent`, process 0 may be taken for dead.

    It is then suspended until another run has the lock, before it reads or makes the path that ends
    in `silent`: in the real protocol the lock, because the work after a check lasts milliseconds
    and the bound is minutes.
    """
    simulation = Simulation()

    def check_op(world, process, op):
        if op[0] not in CHANGES or not str(op[1]).startswith(f"{ROOT}/record/"):
            return
        if os.path.basename(op[1]).startswith("writer.lock"):
            return
        silenced = {0} if ("silent", 0) in world.marks else set()
        if holders(world) - silenced != {process} - silenced or (
            process in silenced and holders(world) - {0}
        ):
            raise Violation(f"process {process} does {op[:2]} while {holders(world)} hold the lock")

    def check_end(world, outcomes):
        record = read_or_violate(simulation, world.disk)
        if record is not None:
            runs = {value // 100 for values in record[0].values() for value in values}
            if len(runs) > 1:
                raise Violation(f"runs {runs} are mixed in one record")
            if damage := [str(problem) for problem in record[2] if problem.kind == "damaged"]:
                raise Violation(f"verify finds {damage}")
        finished = [mark[0] for mark in world.marks if mark[1] == "committed"]
        if finished and not world.killed and not silent and (record is None or not record[0]):
            raise Violation(f"what runs {finished} committed is gone")

    def silence(world):
        if not silent or ("silent", 0) in world.marks or 0 not in holders(world):
            return []
        op = explorer.next_op(0, world.histories[0])
        if op[0] not in ("read", "mkdir") or not op[1].endswith(silent):
            return []
        marks = world.marks | {("silent", 0)}
        return [("silence 0", type(world)(world.disk, world.histories, world.killed, marks))]

    def may_run(world, process):
        return process != 0 or ("silent", 0) not in world.marks or bool(holders(world) - {0})

    with simulation.installed():
        explorer = Explorer(
            simulation.machine,
            bodies_of(simulation),
            check_op=check_op,
            check_end=check_end,
            max_kills=max_kills,
            extra=silence,
            may_run=may_run,
        )
        return explorer.run(disk_of(simulation))


def two_runs(simulation):
    return [whole_run(simulation, pid) for pid in range(2)]


def nothing(simulation):
    return Disk()


def explore_resume(num_steps, first_step):
    """Power failures while steps are cut off behind a checkpoint, on what a first failure left."""
    simulation = Simulation()
    found = {}

    def collect(disk, marks):
        found.setdefault(disk.key(), (disk, committed_in(marks)))

    with simulation.installed():
        first = Explorer(
            simulation.machine, [recording(simulation, 0, 1, range(num_steps), None)], check_crash=collect
        )
        first.run(begun(simulation))
        states = crashes = 0
        for disk, committed in found.values():
            before = {step for step in committed if step < first_step}

            def check(after, marks, before=before):
                read = read_or_violate(simulation, after)
                values = {} if read is None else read[0]
                # before the lock is taken nothing changes; steps after the checkpoint may go
                check_read(read, before, 0, 1) if not recorded(values) else None
                if lost := before - set(values):
                    raise Violation(f"steps {lost} before the checkpoint are lost")

            def end(world, outcomes, before=before):
                found = read_or_violate(simulation, world.disk)
                check_read(found, set(), None, 1)
                values, _, problems = found
                steps = set(values)
                if not before <= steps <= set(range(first_step + 1)) or first_step not in steps:
                    raise Violation(f"resumed to {sorted(values)}, verify finds {[*map(str, problems)]}")

            explorer = Explorer(
                simulation.machine,
                [whole_run(simulation, 7, first_step)],
                check_crash=check if before else None,
                check_end=end if read_or_violate(simulation, disk) else lambda world, outcomes: None,
                pids=range(0),
                generation=1,
            )
            result = explorer.run(disk)
            states, crashes = states + result.states, crashes + result.crashes
        return type(result)(states, crashes, frozenset())


def recorded(values):
    return any(value // 100 == 7 for read in values.values() for value in read)


def explore_archive(num_steps):
    """A step is in the staging folder or in the archive, whole, whatever a power failure leaves."""
    simulation = Simulation()

    def check(disk, marks):
        read = read_or_violate(simulation, disk)
        for step in committed_in(marks) | set(read[0] if read else ()):
            whole = simulation.machine.on(disk, lambda s=step: archived_step(simulation.machine, s))[0]
            if whole is False:
                raise Violation(f"step {step} is committed to the archive and not whole")
            if whole is None and step in committed_in(marks) and (read is None or step not in read[0]):
                raise Violation(f"step {step} is neither in the staging folder nor in the archive")

    with simulation.installed():
        disk = begun(simulation)
        disk = simulation.machine.on(disk, lambda: os.mkdir(f"{ROOT}/archive"))[1]
        disk = Disk(disk.names, disk.data, disk.names, disk.data)
        explorer = Explorer(simulation.machine, [archiving(simulation, range(num_steps))], check_crash=check)
        return explorer.run(disk)


def retained():
    return explore_ranks(1, 3, 1, max_kills=1)


def two_ranks():
    return explore_ranks(2, 1, None)


EVERYDAY = {
    "2 ranks, 1 step": two_ranks,
    "1 rank, 3 steps, keep_last 1, killed": retained,
    "1 rank, 2 steps, keep_last 1, a reader": lambda: explore_ranks(1, 2, 1, with_reader=True),
    "2 runs, one folder": lambda: explore_runs(nothing, two_runs, 0),
    "resume behind step 1 of 1": lambda: explore_resume(1, 1),
    "archive, 1 step": lambda: explore_archive(1),
}
SLOW = {
    "2 runs, one folder",
    "resume behind step 1 of 1",
    "a cut-back removes step.json with the rest",
    "an archive's step is committed before its objects",
    "no check of the lock at commits",
}
LONG = {
    "2 ranks, 1 step, both killed": lambda: explore_ranks(2, 1, None, max_kills=2),
    "2 runs, one taken for dead": lambda: explore_runs(nothing, two_runs, 0, silent="writer.lock"),
    "resume before step 1 of 2": lambda: explore_resume(2, 1),
    "2 ranks, 2 steps, keep_last 1, killed": lambda: explore_ranks(2, 2, 1, max_kills=1),
    "3 ranks, 1 step": lambda: explore_ranks(3, 1, None),
    "2 ranks, 2 steps, a reader": lambda: explore_ranks(2, 2, 1, with_reader=True),
    "2 runs, one folder, one killed": lambda: explore_runs(nothing, two_runs, 1),
    "resume before step 2 of 4": lambda: explore_resume(4, 2),
    "archive, 4 steps": lambda: explore_archive(4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in EVERYDAY]
)
def test_no_state_breaks_the_commit_protocol(name):
    report(name, EVERYDAY[name]())


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_no_state_of_a_larger_run_breaks_the_commit_protocol(name):
    report(name, LONG[name]())


def without_fsync(path, *parts):
    with path.open("wb", buffering=0) as file:
        for part in parts:
            file.write(memoryview(part))


def without_waiting(folder, rank, num_ranks, wait_or_stop):
    try:
        return step_files.collect_rank_manifest(folder, rank, num_ranks)
    except ValueError:
        return RankFiles({}, {})


def removing_first(self):
    """Retention that records the gap after the removal."""
    steps = retention.steps_to_remove(self.sizes, 1 << 50, self.limits)
    for step in steps:
        retention.shutil.rmtree(self.record / "steps" / f"{step:06d}")
        del self.sizes[step]
    if steps:
        self.gaps = self.gaps.with_removed(steps)
        retention.write_gaps(self.record, self.gaps)


def begin_before_lock(self, facts):
    writing.clear_record(self.folder)
    real_begin(self, facts)


def commit_layout_first(self, folder, layout):
    where = self.stream.append("documents", "U8", live_archive.layout_bytes(layout))
    live_archive.commit_layout(self.group, folder, where)
    self.sync_objects()
    self.stream.written.add(f"{folder}/zarr.json")
    self.sync_objects()


def move_without_commit(self, step):
    folder = f"steps/{step:06d}"
    layout = live_archive.step_layout(self.stream, live_archive.open_record(self.staging), step)
    live_archive.shutil.rmtree(self.staging / folder)
    self.commit(folder, layout)


def removed_with_the_rest(folder, committed_by):
    """Remove step.json after the files that it lists."""
    resume.shutil.rmtree(folder)


MUTANTS = {
    "step.json before its files are on the disk": (two_ranks, tensors, "write_durably", without_fsync),
    "the folder of a step without fsync": (two_ranks, step_files, "sync", lambda path: None),
    "rank 0 does not wait for manifests": (two_ranks, writing, "collect_rank_manifest", without_waiting),
    "a header without the folder of steps": (two_ranks, header, "sync", lambda path: None),
    "retention records a gap after the removal": (retained, KeptSteps, "make_room", removing_first),
    "the folder is cleared before the lock": (
        EVERYDAY["2 runs, one folder"],
        writing.RecordWriter,
        "begin",
        begin_before_lock,
    ),
    "no lock": (EVERYDAY["2 runs, one folder"], Explorer, "is_alive", lambda self, world, pid: False),
    "no check of the lock at commits": (
        lambda: explore_runs(nothing, two_runs, 0, silent="steps/000000"),
        writing.RecordWriter,
        "check_lock",
        lambda self, step: None,
    ),
    "a cut-back removes step.json with the rest": (
        LONG["resume before step 1 of 2"],
        resume,
        "remove_committed",
        removed_with_the_rest,
    ),
    "an archive's step is committed before its objects": (
        EVERYDAY["archive, 1 step"],
        LiveArchive,
        "commit",
        commit_layout_first,
    ),
    "staged files go before the archive has them": (
        EVERYDAY["archive, 1 step"],
        LiveArchive,
        "move_step",
        move_without_commit,
    ),
}
real_begin = writing.RecordWriter.begin


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in MUTANTS]
)
def test_the_checker_finds_a_broken_protocol(name):
    explore, place, attribute, broken = MUTANTS[name]
    with mock.patch.object(place, attribute, broken), pytest.raises(Violation) as violation:
        explore()
    print(str(violation.value).splitlines()[0])

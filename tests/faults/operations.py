"""What the fault loop runs: operations, what was there before, and what holds after a fault.

An operation runs in a forked process, in a folder of its own. It ends as a verb does: without an
error, or with SystemExit and one sentence on standard error. `check` runs after every fault.
"""

import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from areal_core.engine.checkpoint.distributed import Snapshot, make_partial
from areal_core.engine.checkpoint.files import Checkpoint, SavedEngine, read_checkpoint
from areal_core.engine.checkpoint.hf_folder import HFFolder
from areal_core.engine.checkpoint.shards import Piece
from areal_core.safety.durable import sentence_of
from areal_core.telemetry.loggers import JsonlLogger, read_stats
from areal_core.trainer.checkpointing import cut_stats, find_checkpoint, write_and_clear
from areal_debug.cli import main
from areal_debug.hang.collect import _into
from hangdoctor.collect.write import HostEntry, Manifest, ProcessEntry, unpack, write_manifest, write_text
from recorder import NotARecord, Recording, RecordWriter, Retention, open_record, verify
from recorder.archive.live_archive import LiveArchive
from recorder.archive.pack import archive_record
from recorder.errors import RecordError, RecordNotFound
from recorder.header import clear_record, write_header
from recorder.integrity.chain import link_to
from recorder.resume import resume_record
from recorder.testing import SCRIPTED_HEADER, gatherers, scripted_batch, send_step, write_scripted_record
from recorder.writer import RecordingOptions

TESTS = Path(__file__).parent.parent
LENGTHS = [3, 8, 5]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        before: make what exists before it, in an empty folder.
        run: do it; errors that it may end with are SystemExit, ValueError and its subclasses.
        check: raise AssertionError unless everything that was complete is intact; gets the folder
            and the lines that `run` printed.
        files: outputs that are at any time absent, the old ones or the new ones, byte for byte.
        unfinished: names that a failure may leave, since the next attempt replaces them.
    """

    name: str
    before: Callable[[Path], object]
    run: Callable[[Path], object]
    check: Callable[[Path, list[str]], None] = lambda folder, lines: None
    files: tuple[str, ...] = ()
    unfinished: str = r"(?!)"


def as_sentence(work: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return the work with OSErrors as a verb, or the script of a run, ends with them."""

    def run(folder: Path) -> None:
        try:
            work(folder)
        except OSError as error:
            raise ValueError(sentence_of(error)) from error

    return run


def load(path: str):
    """Import a module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_tests", TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verb(*words: object) -> None:
    """Run a verb of areal-debug; exit code 1, "a problem was found", is no error of the verb."""
    try:
        main([str(word) for word in words], prog_name="areal-debug")
    except SystemExit as end:
        if end.code == 2:
            raise


# Records


def batch_of(step: int, rank: int) -> dict[str, np.ndarray]:
    return scripted_batch(LENGTHS, seed=100 * step + rank)


def record_steps(
    folder: Path,
    num_ranks: int,
    options: RecordingOptions,
    steps: Iterable[int],
    archive: LiveArchive | None = None,
) -> None:
    """Record as the ranks of a run do; print each step that is known to be committed.

    A folder with a record is resumed at the first of `steps`, or replaced if that is 0.
    """
    steps, errors = list(steps), []
    writers = [
        RecordWriter(folder, rank, num_ranks, gather, options, lambda sentence: None, archive if rank == 0 else None)
        for rank, gather in enumerate(gatherers(num_ranks))
    ]  # fmt: skip
    header = replace(SCRIPTED_HEADER, num_ranks=num_ranks, world_size=num_ranks, recording=options.recording)

    def begin() -> None:
        if options.first_step:
            sizes, gaps = resume_record(folder, options.first_step, header)
            writers[0].kept.resume(sizes, gaps)
            writers[0].last = link_to(folder, max(sizes)) if sizes else None
            return
        clear_record(folder)
        write_header(folder, header)
        if archive is not None:
            archive.begin()

    def run(rank: int) -> None:
        writer = writers[rank]
        try:
            writer.agree()
            if rank == 0:
                writer.attempt(begin)
            writer.agree()
            for step in steps:
                send_step(writer, step, batch_of(step, rank))
                if rank == 0 and not options.queue_steps:
                    print(f"committed {step}", flush=True)
        except Exception as failure:
            errors.append(failure)
        try:
            writer("end", steps=len(steps), error=str(errors[0]) if errors else None)
        except Exception as failure:
            errors.append(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for step in steps:
        print(f"committed {step}", flush=True)


def check_steps(record: Path, num_ranks: int, committed: Iterable[int]) -> None:
    """Assert that the steps in the record have their bits, and that those committed are there."""
    committed = set(committed)
    try:
        opened = open_record(record)
    except (NotARecord, RecordNotFound):
        assert not committed, f"{record} is no record; it had steps {sorted(committed)}"
        return
    report = verify(record)
    kinds = {problem.kind for problem in report.problems}
    assert kinds <= {"unfinished"}, [str(problem) for problem in report.problems]
    assert report.steps_ok == opened.steps
    for number in opened.steps:
        step = opened.step(number)
        for rank in range(num_ranks):
            batch = batch_of(number, rank)
            seen = step.batch(rank)["logprobs"].tobytes()
            assert seen == batch["logprobs"][batch["attention_mask"]].tobytes(), (
                f"step {number} has other bits"
            )
    lost = {step for step in committed - set(opened.steps) if opened.gaps.reason(step) is None}
    assert not lost, f"committed steps {sorted(lost)} are gone"


def committed_in(lines: list[str]) -> set[int]:
    return {int(line.split()[1]) for line in lines if line.startswith("committed ")}


def recording(name: str, num_ranks: int, **options) -> Operation:
    """Record 2 steps, or more for retention, into a new folder."""
    steps = range(4 if "retention" in options else 2)
    options = RecordingOptions(overwrite=True, **options)
    return Operation(
        name,
        before=lambda folder: None,
        run=lambda folder: record_steps(folder / "record", num_ranks, options, steps),
        check=lambda folder, lines: check_steps(folder / "record", num_ranks, committed_in(lines)),
        unfinished=r"record.*",
    )


def resuming() -> Operation:
    """Resume a record of 3 steps at step 1: step 0 stays."""

    def run(folder: Path) -> None:
        options = RecordingOptions(overwrite=True, first_step=1)
        record_steps(folder / "record", 1, options, range(1, 3))

    return Operation(
        "record, resume",
        before=lambda folder: record_steps(folder / "record", 1, RecordingOptions(), range(3)),
        run=run,
        check=lambda folder, lines: check_steps(folder / "record", 1, {0} | committed_in(lines)),
        unfinished=r"record/.*",
    )


def live_archive() -> Operation:
    def run(folder: Path) -> None:
        archive = LiveArchive(folder / "staging", str(folder / "live.zarr"), overwrite=True)
        record_steps(folder / "staging", 1, RecordingOptions(overwrite=True), range(1), archive)

    def check(folder: Path, lines: list[str]) -> None:
        committed = committed_in(lines)
        if (folder / "live.zarr").exists():
            check_steps(folder / "live.zarr", 1, committed)
        else:
            assert not committed

    return Operation(
        "record, live archive",
        lambda folder: None,
        as_sentence(run),
        check,
        unfinished=r"(live.zarr|staging).*",
    )


def source_record(folder: Path, name: str = "record", num_steps: int = 2) -> None:
    """Write a record of few columns: each is several files of an archive."""
    options = RecordingOptions(Recording(scope="rollout"))
    write_scripted_record(folder / name, num_steps=num_steps, options=options)


def check_archive(place: Path, num_steps: set[int]) -> None:
    """Assert that an intact archive with one of these numbers of steps is there; 0: or none."""
    if not place.exists():
        assert 0 in num_steps, f"{place.name} is gone"
        return
    try:
        steps = open_record(place).steps
    except RecordError as error:
        raise AssertionError(f"{place.name} is no record: {error}") from error
    assert verify(place).intact
    assert len(steps) in num_steps, f"{place.name} has {len(steps)} steps"


def archiving(name: str, over_old: bool) -> Operation:
    """Archive 2 steps, over an archive of 1 step or into a new place."""

    def before(folder: Path) -> None:
        source_record(folder)
        if over_old:
            source_record(folder, "old", num_steps=1)
            archive_record(folder / "old", folder / name)

    return Operation(
        f"record archive {name}" + (" --force" if over_old else ""),
        before,
        lambda folder: verb("record", "archive", folder / "record", "--to", folder / name, "--force"),
        lambda folder, lines: check_archive(folder / name, {1, 2} if over_old else {0, 2}),
        unfinished=rf"\.?{re.escape(name)}.+",
    )


def extracting() -> Operation:
    def before(folder: Path) -> None:
        source_record(folder)
        archive_record(folder / "record", folder / "a.zip")

    return Operation(
        "record extract",
        before,
        lambda folder: verb("record", "extract", folder / "a.zip", "--to", folder / "out", "--force"),
        lambda folder, lines: check_archive(folder / "out", {0, 2}),
        unfinished=r"\.?out.+",
    )


def importing() -> Operation:
    def before(folder: Path) -> None:
        samples = [{"input": "2 + 2", "output": text, "gts": "4", "score": 1.0, "step": 1} for text in "34"]
        (folder / "dump").mkdir()
        (folder / "dump/1.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))

    def check(folder: Path, lines: list[str]) -> None:
        try:
            opened = open_record(folder / "out")
        except (NotARecord, RecordNotFound):
            return
        assert {problem.kind for problem in verify(folder / "out").problems} <= {"unfinished"}
        assert len(opened.steps) in (0, 1)

    return Operation(
        "record import",
        before,
        lambda folder: verb("record", "import", folder / "dump", "--to", folder / "out", "--force"),
        check,
        unfinished=r"\.?out.*",
    )


def exporting(format_name: str) -> Operation:
    """Export over an old file, for several steps into several files."""
    per_step = format_name in ("pt", "slime")
    files = ("samples-0", "samples-1") if per_step else ("samples",)
    target = "samples-{step}" if per_step else "samples"

    def before(folder: Path) -> None:
        source_record(folder)
        (folder / files[0]).write_text("an older export")

    def run(folder: Path) -> None:
        verb(
            "record", "export", folder / "record", "--format", format_name, "--to", folder / target, "--force"
        )

    return Operation(f"record export {format_name}", before, run, files=files)


# Pages and reports


def page(name: str, before: Callable[[Path], object], *words: str, files: tuple[str, ...]) -> Operation:
    """A verb that replaces pages; FOLDER in its words is the folder."""

    def before_with_old(folder: Path) -> None:
        before(folder)
        for file in files:
            (folder / file).write_text("an older page")

    filled = [word.replace("FOLDER", "{0}") for word in words]
    return Operation(
        name,
        before_with_old,
        lambda folder: verb(*(word.format(folder) for word in filled), "--force"),
        files=files,
    )


def collection(folder: Path) -> None:
    samples = load("hangdoctor/analysis/test_samples.py")
    ranks = {f"rank_{rank}": samples.still(samples.REDUCE) for rank in range(2)}
    samples.write(folder / "stacks", ranks | {"rank_2": samples.still(samples.DESTROY)})


def post_mortem() -> Operation:
    """The files that `hang watch` writes into the folder of a collection."""
    from areal_debug.hang.watch import post_mortem

    def check(folder: Path, lines: list[str]) -> None:
        stacks = folder / "stacks"
        for name, end in (("post_mortem.html", "</html>"), ("diagnosis.json", "}")):
            if (stacks / name).exists():
                text = (stacks / name).read_text()
                assert text, f"{name} is empty"
                assert text.rstrip().endswith(end), f"{name} ends with {text[-20:]!r}"

    run = as_sentence(lambda folder: post_mortem(folder / "stacks"))
    return Operation("hang watch, post-mortem", collection, run, check)


def gather(folder: Path) -> Manifest:
    for rank in range(2):
        write_text(folder / f"samples/0/rank_{rank}.json", "[]")
    processes = tuple(
        ProcessEntry(f"rank_{rank}", rank, "trainer", "a", 10, None, "dumped", "", "") for rank in range(2)
    )
    manifest = Manifest(100.0, 2, (), (HostEntry("a"),), (100.0,), processes, num_masked=0)
    write_manifest(folder, manifest)
    return manifest


def collecting(name: str) -> Operation:
    """`hang collect` after it has asked the processes, over an older collection if a folder."""
    is_tar = name.endswith(".tar.gz")

    def before(folder: Path) -> None:
        if is_tar:
            (folder / name).write_bytes(b"an older collection")
        else:
            gather(folder / name)
            (folder / name / "older").write_text("")

    def check(folder: Path, lines: list[str]) -> None:
        place = folder / name
        if is_tar:
            if place.read_bytes() == b"an older collection":
                return
            unpack(place.read_bytes(), folder / "unpacked")
            place = folder / "unpacked"
        document = json.loads((place / "collection.json").read_text())
        assert len(document["processes"]) == 2
        assert len(list((place / "samples/0").iterdir())) == 2
        shutil.rmtree(folder / "unpacked", ignore_errors=True)

    return Operation(
        f"hang collect {name}",
        before,
        as_sentence(lambda folder: _into(folder / name, gather, True)),
        check,
        unfinished=rf"{name}\.(partial|old).*",
    )


# Runs


def stats_logger() -> Operation:
    """Statistics: lines that were written stay; a resumed run drops a line that was cut."""

    def run(folder: Path) -> None:
        file = folder / "logs/stats.jsonl"
        cut_stats(file, 2)
        logger = JsonlLogger(file)
        for step in range(2, 5):
            logger(step, {"loss": step / 7})
            print(f"committed {step}", flush=True)
        logger.close()

    def before(folder: Path) -> None:
        logger = JsonlLogger(folder / "logs/stats.jsonl")
        for step in range(2):
            logger(step, {"loss": step / 7})
        logger.close()

    def check(folder: Path, lines: list[str]) -> None:
        rows = read_stats(folder / "logs/stats.jsonl")
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), steps
        assert {0.0, 1.0, *committed_in(lines)} <= set(steps), f"steps {steps} are left"
        assert all(row["loss"] == row["step"] / 7 for row in rows)

    return Operation("statistics", before, as_sentence(run), check, unfinished=r"logs/stats.jsonl")


def checkpoint(folder: Path, step: int, num_ranks: int = 2) -> list[Snapshot]:
    """Make the snapshots of all ranks, as `take_snapshot` does."""
    weights = [Piece("model.w", (rank * 4,), torch.arange(4.0) + step) for rank in range(num_ranks)]
    place = folder / "recover" / f"step-{step:06d}"
    return [
        Snapshot(place, rank, num_ranks, {"actor": [weights[rank]]},
                 Checkpoint({"actor": SavedEngine("actor", False, None)}, [], {"step": step, "version": step}, {}))
        for rank in range(num_ranks)
    ]  # fmt: skip


def save_recovery(folder: Path, step: int, last: int | None) -> None:
    """Write a checkpoint of two ranks as `Recovery.save_when_due` does."""
    snapshots, errors = checkpoint(folder, step), []
    if (error := make_partial(snapshots[0])) is not None:
        raise error
    cancelled, place = threading.Event(), snapshots[0].folder

    def write(snapshot: Snapshot) -> None:
        try:
            write_and_clear(snapshot, last and place.with_name(f"step-{last:06d}"), cancelled)
        except Exception as error:
            errors.append(error)
            cancelled.set()  # as the end of a failed run does

    threads = [threading.Thread(target=write, args=(snapshot,)) for snapshot in snapshots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    print(f"committed {step}", flush=True)


def saving(name: str, step: int) -> Operation:
    """Write a recovery checkpoint after two others, or over one of the same name."""

    def before(folder: Path) -> None:
        save_recovery(folder, 1, None)
        save_recovery(folder, 2, 1)

    def check(folder: Path, lines: list[str]) -> None:
        newest = find_checkpoint(folder / "recover", "resume", True)
        least = max({2, *committed_in(lines)}) if step > 2 else 2
        assert int(newest.name[-6:]) >= least, f"continues from {newest.name}"
        for place in (folder / "recover").glob("step-*[0-9]"):
            assert read_checkpoint(place).state["step"] == int(place.name[-6:])

    return Operation(
        name,
        before,
        lambda folder: save_recovery(folder, step, step - 1),
        check,
        unfinished=r"recover/step-\d+\.(partial|old).*",
    )


def hf_export(name: str, over_old: bool) -> Operation:
    """Write a model in Hugging Face format, as a new folder or over an older one."""
    from transformers import AutoModelForCausalLM

    from areal_core.testing import make_tiny_model, make_tiny_tokenizer

    def save(folder: Path, value: float) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        model.config.update({"written_as": value})
        weights = {key: torch.full_like(tensor, value) for key, tensor in model.state_dict().items()}
        HFFolder(folder / "out", model, weights, None, make_tiny_tokenizer()).write()

    def before(folder: Path) -> None:
        make_tiny_model(folder / "model")
        if over_old:
            save(folder, 1.0)

    def check(folder: Path, lines: list[str]) -> None:
        if not (folder / "out").exists():
            assert not over_old, "the model is gone"
            return
        loaded = AutoModelForCausalLM.from_pretrained(folder / "out")
        values = {float(value) for tensor in loaded.parameters() for value in tensor.detach().unique()}
        assert values == {loaded.config.written_as}, f"{values} with the config of {loaded.config.written_as}"
        assert (folder / "out/tokenizer.json").stat().st_size > 0

    return Operation(
        name, before, lambda folder: save(folder, 2.0), check, unfinished=r"out\.(partial|old).*"
    )


OPERATIONS = [
    recording("record, 1 rank", 1),
    recording("record, 1 rank, background", 1, queue_steps=2),
    recording("record, 2 ranks", 2),
    recording("record, 2 ranks, background", 2, queue_steps=2),
    recording("record, retention", 1, retention=Retention(keep_last=1)),
    resuming(),
    live_archive(),
    archiving("a.zarr", over_old=False),
    archiving("a.zip", over_old=False),
    archiving("a.zarr", over_old=True),
    archiving("a.zip", over_old=True),
    extracting(),
    importing(),
    *map(exporting, ("jsonl", "pt", "parquet", "slime")),
    page("open", lambda folder: source_record(folder), "open", "FOLDER/record", "-o", "FOLDER/x.html", files=("x.html",)),
    page("hang diagnose", collection, "hang", "diagnose", "FOLDER/stacks", "-o", "FOLDER/hang.html",
         files=("hang.html",)),
    post_mortem(),
    collecting("collection"),
    collecting("collection.tar.gz"),
    stats_logger(),
    saving("checkpoint", 3),
    saving("checkpoint, same name", 2),
    hf_export("model", over_old=False),
    hf_export("model, over an older one", over_old=True),
]  # fmt: skip

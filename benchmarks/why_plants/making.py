"""Make the records of planted bugs: commits in a clone, runs of a tiny model."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from areal_core.testing import make_tiny_model, make_tiny_tokenizer
from benchmarks.harness import ROOT, git
from benchmarks.why_plants.plants import HERE, Edit, Library, Plant, innocent_commits, read

NUM_STEPS, LAST_OF_FIRST_RUN = 5, 3
TIMEOUT_S = 900
COMMON = (f"total_train_steps={NUM_STEPS}", "debug.dump_scope=full", "debug.anchor_every_steps=3")
NUM_PROMPTS = 64
DETERMINISTIC = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class RunFailed(Exception):
    """A training run ended with an error."""


@dataclass(frozen=True)
class Made:
    """The records of a plant, and the commit and lines that are its truth."""

    name: str
    left: str
    right: str
    commit: str | None = None
    file: str | None = None
    first_line: int | None = None
    last_line: int | None = None


class Workshop:
    """Folders of models, a clone of the repository and records, below one folder.

    clone/          the repository, at the commit that A runs
    trees/NAME      worktrees of planted commits
    models/         the tiny model, a copy, another one, and another tokenizer
    records/NAME    what a run of a plant uses and writes; records/base-BASE the run A
    made.json       `Made` of every plant
    """

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        self.clone = folder / "clone"
        self.git_lock, self.base_locks = threading.Lock(), {name: threading.Lock() for name in read("bases")}
        (folder / "records").mkdir(parents=True, exist_ok=True)
        if not self.clone.is_dir():
            git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(self.clone))
            git(self.clone, "checkout", "--quiet", "--detach", git(ROOT, "rev-parse", commit))
        self.of_thread = threading.local()  # ends, with its input, when this process does
        self.models = make_models(folder / "models")

    def make(self, plant: Plant) -> Made:
        """Make both records of a plant, unless they exist. Raises RunFailed, ValueError."""
        folder = self.folder / "records" / plant.name
        done = folder / "made.json"
        if done.is_file():
            return Made(**json.loads(done.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
        left = self.both(plant, folder) if plant.both else self.base(plant.base)
        commit, tree, facts = None, self.clone, {}
        if plant.edits is not None:
            with self.git_lock:
                tree, commit = self.commit(plant)
            if commit is not None:
                lines = plant.edits[0].lines(tree)
                facts = {"file": plant.edits[0].file, "first_line": lines[0], "last_line": lines[-1]}
        right = self.train(folder / "b", plant, tree)
        made = Made(plant.name, str(left), str(right), commit, **facts)
        done.write_text(json.dumps(asdict(made), indent=1))
        return made

    def run_warm(
        self, folder: Path, arguments: list[str], environment: dict[str, str], num_ranks: int
    ) -> int:
        """Run a script of one rank in a fork of this thread's warm process; return the code."""
        assert num_ranks == 1
        if not hasattr(self.of_thread, "warm"):
            self.of_thread.warm = subprocess.Popen(
                [sys.executable, str(HERE / "warm.py")],
                env=os.environ | DETERMINISTIC | {"PYTHONPATH": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        job = {
            "folder": str(folder / "script"),
            "output": str(folder / "output.txt"),
            "arguments": arguments,
            "environment": environment,
        }
        warm = self.of_thread.warm
        warm.stdin.write(json.dumps(job) + "\n")
        warm.stdin.flush()
        return int(warm.stdout.readline() or 1)

    def base(self, base: str) -> Path:
        """Return the record A of a base, made on the first call."""
        folder = self.folder / "records" / f"base-{base}"
        with self.base_locks[base]:
            if not (folder / "record" / "end.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                self.train(folder, Plant("base", "equal", None, base), self.clone)
        return folder / "record"

    def both(self, plant: Plant, folder: Path) -> Path:
        """Make the record A of a plant whose A has the edits, too."""
        return self.train(folder / "a", plant, self.clone)

    def commit(self, plant: Plant) -> tuple[Path, str | None]:
        """Commit the edits among innocent commits, in a worktree; return it and the commit.

        Without edits, only the innocent commits, and None.
        """
        tree = self.folder / "trees" / plant.name
        if tree.exists():
            git(self.clone, "worktree", "remove", "--force", str(tree))
        git(self.clone, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        for subject, edits in innocent_commits("before"):
            commit_edits(tree, subject, edits)
        planted = commit_edits(tree, "Simplify the code", plant.edits) if plant.edits else None
        for subject, edits in innocent_commits("after"):
            commit_edits(tree, subject, edits)
        git(self.clone, "branch", "--force", f"planted/{plant.name}", git(tree, "rev-parse", "HEAD"))
        return tree, planted

    def train(self, folder: Path, plant: Plant, tree: Path) -> Path:
        """Run the training of a plant's B, in a folder of its own, and return its record."""
        shutil.copytree(HERE / "run", folder / "script")
        write_prompts(folder / "script" / "prompts.jsonl")
        for edit in plant.script:
            edit.apply(folder / "script")
        paths = [str(tree)]
        if plant.library is not None:
            paths.insert(0, str(patched_library(folder / "libraries", plant.library)))
        record = folder / ("record.zarr" if plant.archive else "record")
        places = self.models | {"folder": str(folder)}
        options = [filled(option, places) for option in (*read("bases")[plant.base], *plant.options)]
        given = (
            f"cluster.fileroot={folder}/files",
            f"actor.path={places['model']}",
            *COMMON,
            *options,
        )
        script = ["train.py", "--config", str(tree / "tests/debug/tiny.yaml"), "--dump-rollout", str(record)]
        environment = DETERMINISTIC | {"PYTHONPATH": os.pathsep.join(paths)} | plant.environment
        is_plain = plant.base != "two" and plant.library is None and not plant.environment
        for more in ((f"total_train_steps={LAST_OF_FIRST_RUN}",), ()) if plant.resumed else ((),):
            run = self.run_warm if is_plain else run_alone
            code = run(folder, [*script, *given, *more], environment, 2 if plant.base == "two" else 1)
            if code != 0:
                lines = (folder / "output.txt").read_text().splitlines()
                raise RunFailed(f"{folder}/output.txt ends with: {' '.join(lines[-3:])}")
        shutil.rmtree(folder / "files", ignore_errors=True)
        return record


def filled(option: str, places: dict[str, str]) -> str:
    """Replace the names of places in an option, `{model}`, by their paths."""
    for name, path in places.items():
        option = option.replace(f"{{{name}}}", path)
    return option


def run_alone(folder: Path, arguments: list[str], environment: dict[str, str], num_ranks: int) -> int:
    """Run a script in a process of its own for each rank; return the exit code."""
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}")
    with (folder / "output.txt").open("w") as output:
        return subprocess.run(
            [sys.executable, *(ranks if num_ranks > 1 else ()), *arguments],
            cwd=folder / "script",
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        ).returncode


def make_models(folder: Path) -> dict[str, str]:
    """Make the models and the tokenizer that options name; return their folders."""
    names = ("model", "moved_model", "other_model", "tokenizer")
    places = {name: folder / name for name in names}
    if not folder.is_dir():
        making = folder.with_name("models.part")
        shutil.rmtree(making, ignore_errors=True)
        for name, seed in (("model", 0), ("moved_model", 0), ("other_model", 1)):
            make_tiny_model(making / name, seed=seed)
        tokenizer = make_tiny_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|> ")
        tokenizer.save_pretrained(making / "tokenizer")
        making.rename(folder)
    return {name: str(place) for name, place in places.items()}


def write_prompts(file: Path) -> None:
    """Write prompts as the arithmetic ones, but in a file."""
    lines = (json.dumps({"prompt": f"{number % 10}+{number // 10}="}) for number in range(NUM_PROMPTS))
    file.write_text("\n".join(lines) + "\n")


def patched_library(folder: Path, library: Library) -> Path:
    """Make a folder with a copy of a package, of links except for the edited file; return it."""
    spec = find_spec(library.package)
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    copied = folder / library.package
    link_all(installed, copied)
    for place in list(Path(library.edit.file).parents)[-2::-1]:  # the folders of the file, outermost first
        (copied / place).unlink()
        link_all(installed / place, copied / place)
    library.edit.apply(copied)
    if library.version is not None:
        info = folder / f"{library.package}-{library.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {library.package}\nVersion: {library.version}\n"
        )
    return folder


def link_all(source: Path, target: Path) -> None:
    """Make a folder with a link to each member of another one, without compiled files."""
    target.mkdir(parents=True)
    for member in source.iterdir():
        if member.name != "__pycache__":
            (target / member.name).symlink_to(member)


def commit_edits(tree: Path, subject: str, edits: list[Edit] | tuple[Edit, ...]) -> str:
    for edit in edits:
        edit.apply(tree)
    identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org")
    git(tree, *identity, "commit", "--quiet", "--all", "-m", subject)
    return git(tree, "rev-parse", "HEAD")

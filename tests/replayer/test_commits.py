"""What differs in the code of two runs, which files act on a stage, and each side's own layers."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.trainer.rl import PPOTrainer
from recorder import open_record
from recorder.testing import SCRIPTED_HEADER
from replayer.commits.acting import ENTRIES, OF_EVERY_STAGE, files_acting, sources
from replayer.commits.outside import CodeDifference, code_differences, unknown_code
from replayer.commits.warm import layers_with_own_code, search_commits
from replayer.compare.stages import STAGES
from replayer.request import Request
from tests.command_line import git
from tests.marks import late

from .conftest import EditedRollouts, tiny_config

ROOT = Path(__file__).parents[2]
CODE = {
    "commit": "a" * 40,
    "dirty_sha256": None,
    "dirty_files": {},
    "script": {"path": "/home/a/train.py", "sha256": "1"},
    "local_files": {"rewards.py": "2"},
    "changed_libraries": {"torch": {}, "vllm": None},
}


def header(code=CODE, **environment):
    return replace(
        SCRIPTED_HEADER, environment={"code": code, "libraries": {}, "variables": {}} | environment
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"commit": "b" * 40}, CodeDifference("commit", "commit aaaaaaaaaa in A, bbbbbbbbbb in B")),
        (
            {"dirty_sha256": "9", "dirty_files": {"core/loss.py": "9"}},
            CodeDifference("commit", "B alone has uncommitted changes of core/loss.py", "core/loss.py"),
        ),
        (
            {"script": {"path": "/home/b/train.py", "sha256": "9"}},
            CodeDifference("script", "the script /home/b/train.py", "/home/b/train.py"),
        ),
        ({"script": {"path": "/home/b/train.py", "sha256": "1"}}, None),
        ({"script": None, "local_files": {}}, None),  # of a replay
        (
            {"local_files": {"rewards.py": "9"}},
            CodeDifference("script", "rewards.py, which the script uses", "rewards.py"),
        ),
        (
            {"local_files": {"rewards.py": "2", "launch.py": "3"}},
            CodeDifference("script", "launch.py, which the script uses", "launch.py", used_by="B"),
        ),
        (
            {"changed_libraries": {"torch": {"torch/optim/adam.py": "9"}, "vllm": {"vllm/a.py": "9"}}},
            CodeDifference(
                "library", "torch/optim/adam.py in B is not the file of torch's wheel", "torch/optim/adam.py"
            ),
        ),
    ],
)
def test_code_that_differs_is_named(change, expected):
    assert code_differences(header(), header(CODE | change)) == (() if expected is None else (expected,))


def test_versions_and_variables_that_differ_are_named_with_their_values():
    left = header(libraries={"torch": "2.1"}, variables={"BONUS": None, "OMP_NUM_THREADS": "1", "OLD": "1"})
    right = header(libraries={"torch": "2.2", "vllm": "1"}, variables={"BONUS": "0.25"})
    assert [(found.kind, found.what) for found in code_differences(left, right)] == [
        ("library", "torch 2.1 in A, 2.2 in B"),
        ("variable", "BONUS is not set in A, 0.25 in B"),
        ("variable", "OMP_NUM_THREADS is 1 in A, not set in B"),
    ]


def test_nothing_differs_from_a_record_that_lacks_the_facts_and_they_are_listed():
    old = header({"commit": "a" * 40, "dirty_sha256": None})
    assert code_differences(header(), old) == ()
    assert unknown_code(header(), old) == (
        "which files had uncommitted changes of B",
        "the user's script of B",
        "the files that the script imports of B",
        "whether installed libraries were changed of B",
    )
    dirty = header({"commit": "a" * 40, "dirty_sha256": "9"})
    (found,) = code_differences(header(), dirty)
    assert (found.kind, found.file) == ("commit", None)


def commit_edit(folder, path, old, new):
    """Replace a text that a file has once, and commit it."""
    file = folder / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    git(folder, "commit", "--quiet", "--all", "-m", f"Change {path}")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path):
    """A clone of this repository, which has no commit of its own yet."""
    folder = tmp_path / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    return folder


LOSSES, ATTENTION = "areal_core/algorithm/losses.py", "areal_core/engine/attention.py"
CLIP = (LOSSES, "clamp(1.0 - eps_clip, 1.0 + higher)", "clamp(1.0 - eps_clip, 1.0 + higher / 99)")
SHUFFLE = ("areal_core/data/loader.py", ".shuffle(rows)", ".shuffle(rows[:])")
COUNT = ("areal_core/algorithm/normalization.py", "self.count - int(unbiased)", "self.count - 1 * 1")
SCALE = ("areal_core/engine/optimizer.py", "import torch\n", "import torch\n\nSCALE = 2\n")
CAST = (
    ATTENTION,
    "    packing = Packing(lengths, scale, dropout",
    "    if module.layer_idx == 1:\n        query = query.bfloat16().float()\n"
    "    packing = Packing(lengths, scale, dropout",
)
INNOCENT = (
    LOSSES,
    "    clip_mask = mask & (unclipped < clipped)",
    "    clip_mask = (unclipped < clipped) & mask",
)


def line_of(folder, path, text):
    return next(n for n, line in enumerate((folder / path).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("stage", "edit", "text"),
    [
        ("loss", CLIP, "higher / 99"),
        late("logprobs", CAST, "module.layer_idx == 1"),
        late("batch", SHUFFLE, "shuffle(rows[:])"),
        late("advantages", COUNT, "self.count - 1 * 1"),
        late("weights", SCALE, "SCALE = 2"),
    ],
)
def test_the_changed_line_of_a_stage_is_found_beside_changes_that_act_on_others(clone, stage, edit, text):
    other = "weights" if stage != "weights" else "advantages"
    doc = ("areal_core/algorithm/advantages.py", '"""', '"""One sentence more. ')
    file = clone / doc[0]
    file.write_text(file.read_text().replace(doc[1], doc[2], 1) + "\n# a comment\n")
    (clone / "README.md").write_text("x")
    commit_edit(clone, *edit)
    line = line_of(clone, edit[0], text)
    (found,) = files_acting(clone, "HEAD^", "HEAD", stage)
    assert (found.path, found.first_line, found.distance) == (edit[0], line, 0)
    if edit[0] != ATTENTION:
        assert files_acting(clone, "HEAD^", "HEAD", other) == ()


def test_every_entry_of_the_table_exists():
    assert tuple(ENTRIES) == STAGES
    with sources(ROOT, "HEAD") as code:
        entries = {entry for stage in ENTRIES.values() for entry in stage} | set(OF_EVERY_STAGE)
        assert [entry for entry in sorted(entries) if not code.expand(entry)] == []


# events of a step -> stages whose code may run from the event to the next
RUNS = {
    "batch": ("logprobs", "advantages"),
    "advantages": ("loss",),
    "loss": ("loss", "gradient"),
    "gradients": ("gradient", "weights"),
    "optimizer": ("loss", "weights"),
}
# around a step: what logs, times, observes and checks it
AROUND = (
    "telemetry/",
    "trainer/trace_hooks",
    "trainer/step_stats.py",
    "trainer/nonfinite.py",
    "trainer/observed.py",
    "trainer/rl.py",
    "engine/ranks.py",
    "agent/transcript.py",
)


@pytest.mark.long
def test_a_real_step_runs_no_code_that_the_table_does_not_reach(tmp_path, tiny_model):
    core = f"{ROOT}/areal_core/"
    ran = {event: set() for event in RUNS}
    now = [""]

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and now[0] in ran and code.co_filename.startswith(core):
            ran[now[0]].add((code.co_filename[len(core) :], code.co_qualname.split(".<")[0]))

    def observe(event, **facts):
        now[0] = event

    config = tiny_config(tmp_path, tiny_model, 1)
    with PPOTrainer(
        config,
        source=lambda trainer: EditedRollouts(lambda batch, step: batch),
        observers=[lambda trainer: observe],
        total_steps=1,
        print_steps=False,
    ) as trainer:
        sys.setprofile(note)
        trainer.train()
        sys.setprofile(None)
    assert all(len(functions) > 2 for functions in ran.values())  # little runs behind the optimizer
    with sources(ROOT, "HEAD") as code:
        logged = code.distances(["areal_core/trainer/step_stats.py"])
        for event, stages in RUNS.items():
            entries = [entry for stage in stages for entry in ENTRIES[stage]]
            reached = code.distances([*entries, *OF_EVERY_STAGE], OF_EVERY_STAGE)
            missing = {
                (path, name)
                for path, name in ran[event]
                if not path.startswith(AROUND)
                and name in code.file(f"areal_core/{path}").definitions
                and (f"areal_core/{path}", name) not in reached
                and logged.get((f"areal_core/{path}", name), 2) > 1
            }
            assert missing == set(), event


@pytest.mark.long
def test_the_commit_is_found_by_replays_with_each_commits_own_code(clone, tiny_run, tiny_model):
    good = git(clone, "rev-parse", "HEAD")
    commit_edit(clone, *INNOCENT)
    bug = commit_edit(clone, *CLIP)
    lines = []
    request = Request(tiny_run.path, 0, 1, str(tiny_model))
    report = search_commits(request, clone, good, "HEAD", 1, lines.append)
    assert [commit.hash for commit in report.culprits] == [bug]
    assert "losses.py" in report.files
    assert (len(lines), report.num_replays, report.num_commits) == (3, 3, 2)
    (found,) = files_acting(clone, f"{bug}^", bug, "loss")
    assert (found.path, found.first_line) == (LOSSES, line_of(clone, LOSSES, "higher / 99"))


@pytest.mark.long
def test_a_cast_in_one_layer_is_found_with_its_module_and_file(clone, tmp_path, tiny_run, tiny_model):
    here = open_record(tiny_run.path)
    good, bad = git(clone, "rev-parse", "HEAD"), commit_edit(clone, *CAST)
    left, right = (with_commit(here, commit) for commit in (good, bad))
    report = layers_with_own_code(left, right, 0, str(tiny_model), clone)
    assert (report.name, report.kind, report.input_differs) == (
        "model.layers.1.self_attn",
        "LlamaAttention",
        False,
    )
    assert (report.file, report.line) == (ATTENTION, line_of(clone, ATTENTION, "module.layer_idx == 1"))
    assert report.with_current_code == ()


def with_commit(record, commit):
    found = open_record(record.path)
    found.header.environment["code"] = {"commit": commit}
    return found

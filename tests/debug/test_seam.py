"""`areal-debug record seam`: each state of a resume continues, changed, or is unobserved."""

import json
import shutil

import numpy as np
import pytest
import torch

from areal_debug import Recorder
from areal_debug.resume.seam import line_of
from tests.command_line import invoke, printed, reported
from tests.marks import late

STEPS, BREAK = 24, 12


def rows_of(step, seed, version, kl, engine, prompts):
    rng = np.random.default_rng(seed)
    rows = []
    for group, prompt in enumerate(prompts):
        for _ in range(2):
            logp = -rng.exponential(2.0, 8)
            rows.append(
                {
                    "prompt_tokens": [7, 100 + prompt % 97, 300 + prompt // 97], "completion_tokens": rng.integers(3, 90, 8),
                    "logprobs": logp, "old_logprobs": logp + rng.normal(0, engine, 8), "group": group,
                    "ref_logprobs": logp + rng.normal(0, np.sqrt(2 * kl), 8), "versions": version,
                    "reward": float(rng.integers(0, 2)), "finish_reason": "stop",
                }
            )  # fmt: skip
    return rows


def write_half(folder, steps, **changes):
    """Write a record of a run; `changes` are functions of the step."""
    now = {
        "number": lambda s: s, "seed": lambda s: s, "version": lambda s: s, "kl": lambda s: 0.01 * (1 + s),
        "engine": lambda s: 0.01, "prompts": lambda s: range(5 * s, 5 * s + 5), "lr": lambda s: 1e-3 * min(1, (1 + s) / 5),
    } | changes  # fmt: skip
    with Recorder(folder / "record", trainer="slime", config={"global_batch_size": 10}) as recorder:
        for step in steps:
            own = {key: value(step) for key, value in now.items() if key not in ("number", "lr")}
            recorder.step(now["number"](step), rows_of(step, **own), stats={"train/lr-pg_0": now["lr"](step)})


@pytest.fixture(scope="module")
def first_half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    write_half(folder, range(BREAK))
    return folder


@pytest.fixture
def write(first_half, tmp_path):
    """Write two records of a run, a and b; `changes` act after the resume."""

    def both(**changes):
        shutil.copytree(first_half, tmp_path / "a")
        write_half(tmp_path / "b", range(BREAK, STEPS), **changes)

    return both


def seam(*arguments):
    code, document = reported("record", "seam", *arguments)
    return code, {state["id"]: state for state in document["states"]}


@pytest.mark.parametrize(
    ("state", "changes", "says"),
    [
        (None, {}, ""),
        ("step", {"number": lambda s: s - 3}, "steps 9 to 11 are trained on again"),
        ("learning_rate", {"lr": lambda s: 1e-3 * min(1, (s - 11) / 5)}, "the scheduler begins again"),
        (
            "rng",
            {"seed": lambda s: s - 12, "prompts": lambda s: range(5 * (s - 12), 5 * s - 55)},
            "the seeds begin again",
        ),
        late("version", {"version": lambda s: s - 12}, "the version counter is 0 again"),
        ("reference", {"kl": lambda s: 1e-9 * (s - 11)}, "the reference is the resumed policy"),
        late("engine", {"engine": lambda s: 0.01 if s > 12 else 0.9}, "sampled with other weights"),
        ("data", {"prompts": lambda s: range(5 * (s - 12), 5 * s - 55)}, "the data is read again"),
        ("staleness", {"version": lambda s: 12 + (s - 12) // 4}, "staler than ever"),
        late("layout", {"prompts": lambda s: range(9 * s, 9 * s + 9)}, "rows of a step"),
    ],
)
def test_each_state_is_named_and_the_others_continue(tmp_path, write, state, changes, says):
    write(**changes)
    code, states = seam(tmp_path / "a", tmp_path / "b")
    changed = {name for name, one in states.items() if one["state"] == "changed"}
    follows = {"rng": {"data"}, "version": {"staleness"}}.get(state, set())
    assert changed - follows == ({state} if state else set())
    assert code == (1 if state else 0)
    assert states["optimizer"]["state"] == "unobserved"
    assert states["optimizer"]["record"].startswith("keep optimizer.pt")
    if state:
        assert says in states[state]["what"]


@pytest.mark.parametrize(("step", "verdict"), [(13.0, "continues"), (1.0, "changed")])
def test_moments_are_compared_from_the_checkpoints(tmp_path, write, step, verdict):
    write()
    for name, value in (("a", 12.0), ("b", step)):
        state = {"state": {0: {"step": torch.tensor(value), "exp_avg_sq": torch.full((3, 3), value * 1e-6)}}}
        (tmp_path / name / "checkpoint").mkdir()
        torch.save(state, tmp_path / name / "checkpoint" / "optimizer.pt")
    assert seam(tmp_path / "a", tmp_path / "b")[1]["optimizer"]["state"] == verdict


def test_one_log_is_cut_where_it_paused_or_as_given(tmp_path):
    def lines(pause):
        rows = [
            {"step": s, "kl": 0.01 * (s + 1) if s < 12 else 1e-6, "_timestamp": 10.0 * s + (s > 11) * pause}
            for s in range(24)
        ]
        return "".join(json.dumps(row | {"learning_rate": 1e-3}) + "\n" for row in rows)

    log = tmp_path / "metrics.jsonl"
    log.write_text(lines(5000))
    code, states = seam(log)
    assert (code, states["reference"]["state"], states["learning_rate"]["state"]) == (
        1,
        "changed",
        "continues",
    )
    log.write_text(lines(0))
    said = printed("record", "seam", log, code=2)
    assert "does not show where it resumed: give the step with --at" in said
    assert seam(log, "--at", 12)[1]["reference"]["state"] == "changed"
    said = printed("record", "seam", log, "--at", "99", code=2)
    assert "has steps 0 to 23: give one between" in said


def write_log(file, steps, **columns):
    rows = [{"step": s} | {name: value(s) for name, value in columns.items()} for s in steps]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


RATE = {
    "warm restarts": (30, lambda s: 1e-3 * (1 - s % 10 / 10), "continues"),
    "two steps of a warm-up": (2, lambda s: 1e-4 * (s + 1), "unobserved"),
    "a drop": (30, lambda s: 1e-3 if s < 30 else 1e-4, "changed"),
}


@pytest.mark.parametrize("case", RATE)
def test_a_rate_that_moves_by_its_schedule_is_no_change(tmp_path, case):
    at, rate, verdict = RATE[case]
    one = write_log(tmp_path / "a.jsonl", range(at), learning_rate=rate)
    other = write_log(tmp_path / "b.jsonl", range(at, 2 * at), learning_rate=rate)
    assert seam(one, other)[1]["learning_rate"]["state"] == verdict


@pytest.mark.parametrize(("after", "verdict"), [(lambda s: s, "continues"), (lambda s: s + 9, "changed")])
def test_a_resume_that_leaves_stale_samples_moves_no_version_counter(tmp_path, after, verdict):
    """Versions number the steps, 3 behind before the resume; few rewards on both sides are said to be few."""
    stale = {"version": lambda s: max(s - 3, 0), "reward": lambda s: 0.5}
    one = write_log(tmp_path / "a.jsonl", range(3, 9), **stale)
    other = write_log(tmp_path / "b.jsonl", range(9, 11), **stale | {"version": after})
    states = seam(one, other)[1]
    assert states["version"]["state"] == verdict
    assert states["reward"]["record"] == "6 steps before the resume and 2 after it are too few"


def test_a_log_every_ten_steps_continues_between_two_lines(tmp_path):
    one = write_log(tmp_path / "a.jsonl", range(0, 100, 10), kl=lambda s: 0.1)
    for first, state in ((95, "continues"), (105, "continues"), (140, "changed")):
        other = write_log(tmp_path / "b.jsonl", range(first, 300, 10), kl=lambda s: 0.1)
        assert seam(one, other)[1]["step"]["state"] == state


def test_several_pauses_are_asked_about_and_a_trainer_log_decides(tmp_path):
    clock = {"kl": lambda s: 0.1, "_timestamp": lambda s: 10 * s + 600 * (s // 10)}
    write_log(tmp_path / "metrics.jsonl", range(40), **clock)
    done = invoke("record", "seam", tmp_path)
    assert (done.exit_code, "paused before steps 10, 20, 30" in done.stderr) == (2, True)
    (tmp_path / "trainer.log").write_text("continuing at step 25 from checkpoints/step-000025\n")
    assert seam(tmp_path)[1]["step"]["after"] == "first 25"


@pytest.mark.parametrize("again", [False, True])
def test_few_prompts_in_a_cycle_are_not_read_again(tmp_path, write, again):
    write(prompts=lambda s: [(5 * (s - 12) + i) % 60 for i in range(5)] if again else [0, 1, 2, 3, 4])
    if not again:  # every step has the same prompts, before, too
        write_half(tmp_path / "c", range(BREAK), prompts=lambda s: range(5), lr=lambda s: 1e-3)
    found = seam(tmp_path / ("a" if again else "c"), tmp_path / "b")[1]
    assert found["data"]["state"] == ("changed" if again else "continues")


def write_two(folder, *configs, **facts):
    """Write records a and b, of six steps each, with these configurations."""
    for name, first, config in zip("ab", (0, 6), configs, strict=True):
        with Recorder(folder / name, trainer="slime", config=config) as recorder:
            for step in range(first, first + 6):
                rows = rows_of(step, step, step, 0.01, 0.01, range(5 * step, 5 * step + 5))
                recorder.step(step, rows, **facts)


def test_generators_that_never_move_and_an_absent_configuration_show_nothing(tmp_path):
    write_two(tmp_path, {"global_batch_size": 10, "eval_batch_size": 6}, {}, rng={"torch": "00"})
    states = seam(tmp_path / "a", tmp_path / "b")[1]
    assert states["layout"]["state"] == "continues"
    assert states["rng"]["state"] != "changed"


def test_a_run_says_in_one_line_what_its_own_resume_changed(tmp_path):
    with Recorder(tmp_path / "record", trainer="slime", config={"global_batch_size": 10}) as recorder:
        for step in range(STEPS):
            rows = rows_of(step, step, step % BREAK, 0.01, 0.01, range(5 * step, 5 * step + 5))
            recorder.step(step, rows, stats={"train/lr-pg_0": 1e-3})
    line = line_of(tmp_path / "record", BREAK)
    assert line.startswith("resumed at step 12: ")
    assert "between step 11 and step 12" in line
    assert "version" in line
    assert line.endswith(f"(areal-debug record seam {tmp_path / 'record'} --at 12)")
    assert "\n" not in line
    assert "is unknown (" in line_of(tmp_path / "record", STEPS)
    with Recorder(tmp_path / "after", trainer="slime") as recorder:
        recorder.step(STEPS, rows)
    both = f"areal-debug record seam {tmp_path / 'record'} {tmp_path / 'after'} "
    assert both in line_of(tmp_path / "after", STEPS)


def test_an_option_that_differs_is_listed_beside_the_states(tmp_path):
    configs = [
        {"gconfig": {"temperature": 1.0}, "output_dir": "a"},
        {"gconfig": {"temperature": 0.6}, "output_dir": "b"},
    ]
    write_two(tmp_path, *configs)
    done = invoke("record", "seam", tmp_path / "a", tmp_path / "b")
    assert "between step 5 and step 6, but options differ: 1" in done.output
    assert "gconfig.temperature 1.0 -> 0.6" in done.output
    assert "output_dir" not in done.output

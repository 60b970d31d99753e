"""Verifiable rewards, their lookup, and a pool that survives functions that hang, die or fail."""

import inspect
import time
import tomllib
import uuid
from pathlib import Path

import psutil
import pytest

from areal_core.errors import RewardError
from areal_core.reward import RewardPool, load_reward_fn
from areal_core.reward import functions as functions_of_rewards
from areal_core.reward.signature import check_columns, check_reward_fn
from areal_debug.train.script_options import check_reward_functions

# One function that fails as its row defines.
FUNCTIONS = """
import ctypes, os, subprocess, sys, time

class Silent:
    def __repr__(self):
        raise SystemExit("no text")

def by_row(prompt, completions, prompt_ids, completion_ids, do, **row):
    print("a reward function may print")
    if do == "echo":
        return len(completions) + sum(completion_ids) + row.get("extra", 0)
    if do == "pid":
        return os.getpid()
    if do == "has torch":
        return float("torch" in sys.modules)
    if do == "sleep":
        time.sleep(60)
    if do == "hang in C":
        ctypes.PyDLL(None).sleep(60)
    if do == "start a program":
        subprocess.run(["sleep", "61"], check=True)
    if do == "leave programs and die":
        [subprocess.Popen(["sleep", row["mark"]]) for _ in range(4)]
        os._exit(7)
    if do in ("huge", "exits", "has no text"):
        return {"huge": lambda: 10**400, "exits": sys.exit, "has no text": Silent}[do]()
    if do == "die once":
        if not os.path.exists(row["mark"]):
            open(row["mark"], "w").close()
            os._exit(7)
        return 1.0
    if do == "raise":
        raise KeyError("no such answer")
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "true": True, "int": 3}[do]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "functions.py"
    file.write_text(FUNCTIONS)
    return f"{file}:by_row"


@pytest.fixture(scope="module")
def lasting_pool(functions):
    """A pool for functions that return or raise."""
    with RewardPool(functions, num_workers=1) as made:
        yield made


@pytest.fixture
def pool(functions):
    with RewardPool(functions, timeout_s=1.0, num_workers=1) as made:
        yield made


def score(pool, do, **row):
    return pool.submit("the prompt", "abc", [1], [2, 3], do=do, **row).result(timeout=60)


REWARDS = tomllib.loads(Path(__file__).with_name("rewards.toml").read_text())


@pytest.mark.parametrize(
    ("function", "completion", "answer", "reward"),
    [(name, *row) for name, rows in REWARDS.items() for row in rows],
)
def test_a_completion_has_the_reward_of_its_answer(function, completion, answer, reward):
    assert getattr(functions_of_rewards, function)("q", completion, [], [], answer=answer) == pytest.approx(
        reward
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8k", "is not an import path; expected package.module:Name"),
        ("no_such_package.rewards.f", "no_such_package.rewards cannot be imported"),
        ("areal_core.reward.functions.gsm9k_reward_fn", "has no gsm9k_reward_fn; its functions"),
        ("areal_core.reward.functions.GSM8K_ANSWER", "is a Pattern, not a function"),
        ("nowhere/reward.py:f", "there is no file nowhere/reward.py"),
    ],
)
def test_reward_function_that_is_not_there_is_named(name, message):
    with pytest.raises(RewardError) as error:
        load_reward_fn(name)
    assert message in str(error.value)


def test_stuck_worker_is_killed_and_replaced(pool, caplog):
    stuck = int(score(pool, "pid"))
    start = time.monotonic()
    assert score(pool, "hang in C") == 0.0
    assert time.monotonic() - start < 40
    assert not psutil.pid_exists(stuck)
    assert pool.num_timeouts == 1
    assert "by_row did not return within 1.0 s; its reward is 0.0" in caplog.text
    assert score(pool, "echo") == 8.0
    assert int(score(pool, "pid")) != stuck


def sleeping_after(timeout_s, mark):
    """Return the programs `sleep MARK` that have not ended in that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", mark]]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.mark.long
def test_child_processes_of_a_stuck_function_end_with_it(pool):
    assert score(pool, "start a program") == 0.0
    assert sleeping_after(5, "61") == []


def test_time_out_raises_if_it_has_no_reward(functions):
    with (
        RewardPool(functions, timeout_s=0.5, num_workers=1, timeout_reward=None) as pool,
        pytest.raises(RewardError, match=r"did not return within 0.5 s\nprompt 'the prompt'"),
    ):
        score(pool, "sleep")


def test_worker_that_died_is_replaced_and_the_call_repeated(pool, tmp_path):
    assert score(pool, "die once", mark=str(tmp_path / "mark")) == 1.0


def test_exception_is_raised_again_with_row_and_traceback(lasting_pool):
    with pytest.raises(RewardError) as error:
        score(lasting_pool, "raise", answer="42")
    message = str(error.value)
    assert "by_row raised KeyError: 'no such answer'" in message
    assert "\nprompt 'the prompt'\ncompletion 'abc'\nrow {" in message
    assert "'answer': '42'" in message
    assert 'raise KeyError("no such answer")' in message
    assert score(lasting_pool, "echo") == 8.0


def test_programs_that_a_function_leaves_end_when_it_dies(functions):
    mark = str(uuid.uuid4().int % 10**9 + 10**6)
    with RewardPool(functions, num_workers=1, max_retries=1) as pool:
        with pytest.raises(RewardError, match=r"killed its process 2 times\n(.|\n)*'do': 'leave programs"):
            score(pool, "leave programs and die", mark=mark)
        assert score(pool, "echo") == 8.0
    assert sleeping_after(30, mark) == []  # a killed process ends a moment later


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("huge", "returned 10+; expected a finite number"),
        ("exits", "raised SystemExit(.|\n)*"),
        ("has no text", "returned a Silent whose text raises SystemExit; expected a finite number"),
        ("nan", "returned nan; expected a finite number"),
        ("inf", "returned inf; expected a finite number"),
        ("text", "returned '1.0'; expected a finite number"),
        ("none", "returned None; expected a finite number"),
    ],
)
def test_what_a_function_returns_or_raises_never_ends_its_worker(lasting_pool, do, message):
    before = score(lasting_pool, "pid")
    with pytest.raises(RewardError, match=f"by_row {message}\nprompt 'the prompt'"):
        score(lasting_pool, do)
    assert score(lasting_pool, "pid") == before


def test_closing_ends_busy_workers(functions):
    pool = RewardPool(functions, timeout_s=50.0, num_workers=1)
    worker = int(pool.submit("p", "c", [], [], do="pid").result(60))
    running = pool.submit("p", "c", [], [], do="sleep")
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 40
    assert not psutil.pid_exists(worker)
    with pytest.raises(RewardError, match="was running when its pool was closed"):
        running.result(1)


def test_an_argument_that_is_no_column_of_the_rows_is_named():
    def score(prompt, completions, prompt_ids, completion_ids, answer, scale=1.0, **row):
        return 1.0

    check_columns("score", inspect.signature(score), ["messages", "answer"])
    with pytest.raises(RewardError, match="its rows have gold, messages; rename"):
        check_columns("score", inspect.signature(score), ["messages", "gold"])


@pytest.mark.parametrize(
    "argument", ["answer", "*, answer", "anser=None", "*, anser=None", "anser", "*, anser"]
)
def test_a_script_whose_reward_needs_no_column_of_the_rows_is_refused_before_the_run(tmp_path, argument):
    script = tmp_path / "train.py"
    call = 'trainer.train(workflow_kwargs={"reward_fn": score})'
    script.write_text(
        f"def score(prompt, completions, prompt_ids, completion_ids, {argument}, **row): 1\n{call}\n"
    )
    check_reward_functions(script)
    if not argument.endswith("anser"):
        check_reward_functions(script, {"answer", "messages"})
        return
    with pytest.raises(RewardError, match="'anser', which is no column of the dataset"):
        check_reward_functions(script, {"answer", "messages"})


RIGHT = "define it as\n    def score(prompt, completions, prompt_ids, completion_ids, answer, **row) -> float"


@pytest.mark.parametrize(
    ("parameters", "takes_row", "reason"),
    [
        ("prompt, completion, gold", False, "too many positional arguments"),
        (
            "prompt, completions, prompt_ids, completion_ids, answer",
            True,
            "unexpected keyword argument 'messages'",
        ),
        ("prompt, completions, prompt_ids, completion_ids, answer", False, ""),
        ("prompt, completions, prompt_ids, completion_ids, answer, **row", True, ""),
        ("*texts, answer, **row", True, ""),
    ],
)
def test_a_signature_is_checked_before_anything_is_called(tmp_path, parameters, takes_row, reason):
    text = f"import no_such_package\n\ndef score({parameters}):\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(text)
    scope: dict = {}
    exec(text.partition("\n")[2], scope)
    for reward_fn in ("mine.score", "mine.py:score", scope["score"]):
        if not reason:
            check_reward_fn(reward_fn, [tmp_path], takes_row)
            continue
        with pytest.raises(RewardError) as error:
            check_reward_fn(reward_fn, [tmp_path], takes_row)
        assert str(error.value).startswith(f"reward function score({parameters}) is called with prompt,")
        assert f"({reason})" in str(error.value).replace("got an ", "")
        assert str(error.value).endswith(RIGHT)

"""An algorithm of the user's own: its shapes and statistics; recorded, replayed and changed."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from areal_core.config import PPOActorConfig
from areal_core.environment import DETERMINISTIC
from areal_core.errors import ConfigError
from areal_core.telemetry.stats import Stats
from areal_core.trainer.objective import build_objective

pytest_plugins = "pytester"
EXAMPLE = Path(__file__).parents[2] / "examples/custom_algorithm"
FLAT = {
    "logprobs": torch.tensor([-1.0, -2.0, -3.0]),
    "prox_logp": torch.tensor([-1.0, -2.0, -3.0]),
    "advantages": torch.tensor([2.0, 4.0, 8.0]),
    "loss_mask": torch.tensor([1, 1, 0]),
    "cu_seqlens": torch.tensor([0, 3]),
}


def doubled(logprobs, entropy, batch, factor, options):
    return -factor * batch["advantages"] * (logprobs - options.eps_clip), {
        "entropy": entropy,
        "factor": factor,
    }


def halved(rewards, inputs):
    return inputs["advantages"] / 2, {"before": inputs["advantages"]}


def minus_one(rewards, batch):
    return rewards - 1


def of_one(logprobs):
    return logprobs


def detached(logprobs, entropy, batch):
    return logprobs.detach()


def of_wrong_shape(logprobs, entropy, batch):
    return logprobs.sum()


def of_wrong_statistic(logprobs, entropy, batch):
    return logprobs, {"odd": logprobs[:1]}


def objective(**options):
    stats = Stats()
    paths = {key: f"{__file__}:{value}" if key.endswith("_fn") else value for key, value in options.items()}
    built = build_objective(PPOActorConfig(kl_ctl=0.0, **paths), lambda sums: sums, stats, None)
    return built, stats


def test_an_own_loss_is_summed_over_the_mask_with_its_statistics():
    subject, stats = objective(loss_fn="doubled", objective_kwargs={"factor": 3.0})
    logprobs, entropy = torch.tensor([-1.0, -2.0, torch.inf]), torch.tensor([0.5, 1.5, torch.nan])
    with stats.scope("update"):
        loss = subject.loss(logprobs, entropy, FLAT)
    assert float(loss) == pytest.approx(3 * 2 * 1.2 + 3 * 4 * 2.2)  # the last token is not in the mask
    found = stats.export()
    assert found["update/loss_fn/entropy/avg"] == 1.0
    assert found["update/loss_fn/factor"] == 3.0
    assert found["update/actor_loss/max"] == pytest.approx(3 * 4 * 2.2)


def test_own_advantages_and_rewards_take_the_place_of_ours():
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.int32),
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1], [0, 0, 1]]),
        "logprobs": torch.zeros(2, 3),
        "versions": torch.zeros(2, 3, dtype=torch.int32),
        "rewards": torch.tensor([3.0, 2.0]),
        "prompt_id": torch.tensor([0, 0]),
        "sample_id": torch.tensor([0, 1]),
        "finish_reason": torch.tensor([0, 0]),
    }
    subject, stats = objective(advantage_fn="halved", reward_shaping_fn="minus_one")
    inputs = subject.learning_inputs(batch, None, None, 0)
    assert inputs["advantages"].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.5, 0.0]]
    assert stats.export()["advantage_fn/before/max"] == 2.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss_fn": "of_wrong_shape"}, r"loss_fn returned a tensor of \[\] torch.float32; expected a float.*\[3\]"),
        ({"loss_fn": "of_wrong_statistic"}, r"tensor of \[1\] torch.float32 as the statistic 'odd'; expected a num"),
        ({"loss_fn": "of_one"}, r"cannot be called with \(logprobs, entropy, batch\): too many positional"),
        ({"loss_fn": "detached"}, "returned losses without a gradient: it must not detach `logprobs`"),
        ({"loss_fn": "EXAMPLE"}, "actor.loss_fn .*EXAMPLE' is a PosixPath, not a function"),
        ({"loss_fn": "nothing"}, "has no nothing; its functions and classes are "),
        ({"objective": "json.JSONDecoder"}, "'json.JSONDecoder' is not a class derived from PolicyObjective"),
        ({"loss_fn": "doubled", "objective_kwargs": {"beta": 1}}, "objective_kwargs has beta, which no class or"),
        ({"objective_kwargs": {"beta": 1}}, "objective_kwargs has beta, which no class or function"),
    ],
)  # fmt: skip
def test_what_is_no_loss_is_refused_with_what_is_expected(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        objective(**options)[0].loss(torch.zeros(3, requires_grad=True), torch.zeros(3), FLAT)


@pytest.fixture(scope="module")
def example(tmp_path_factory, areal_debug, tiny_model):
    """The example in a folder of its own, recorded on two ranks for two steps."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("algorithm.py", "train.py", "train.yaml"):
        shutil.copy(EXAMPLE / name, folder)
    paths = (f"cluster.fileroot={folder}/runs", f"actor.path={tiny_model}", "total_train_steps=2")
    run = ("train", folder / "train.py", *paths)
    done = areal_debug(*run, "--dump-rollout", folder / "record", **DETERMINISTIC)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, run


@pytest.mark.long
def test_one_digit_of_an_own_loss_fails_its_test_and_is_the_first_cause(example, areal_debug, pytester):
    folder, run = example
    shutil.copytree(folder / "record", pytester.path / "record")
    shutil.copy(folder / "algorithm.py", pytester.path)
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.replay("record", code="algorithm.py", model={run[3].partition("=")[2]!r})
        def test_the_loss_is_as_recorded(replay_record):
            replay_record()
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    source = pytester.path / "algorithm.py"
    source.write_text(source.read_text().replace("ceiling) * batch", "ceiling - 0.9) * batch"))
    failed = pytester.runpytest_subprocess()
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            "cause: loss cispo of algorithm.py, changed: function cispo (line *",
            "first in step 0, stage loss: *",
        ]
    )
    why = areal_debug("why", folder / "record", "--code", source)
    assert re.search(r"step 0, stage loss, because function cispo of algorithm.py \(loss cispo\)", why.stdout)

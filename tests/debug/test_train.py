"""The files of a training run, and options that need a complete run."""

import json
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_core.telemetry.loggers import read_stats

HERE = Path(__file__).parent


def test_a_run_leaves_checkpoints_statistics_and_tensorboard_behind(train, tiny_model, tmp_path):
    done = train(
        *("saver.freq_steps=2", "actor.kl_ctl=0.05", f"ref.path={tiny_model}", "ref.dtype=float32"),
        f"stats_logger.tensorboard.path={tmp_path}/tensorboard",
        "allocation_mode=embedded|fsdp:d2",
        "stats_logger.wandb.wandb_api_key=secret",
        to=tmp_path,
        OBSERVE_ON_RANK="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # An observer on one rank gets values that need a collective of all ranks.
    assert done.stdout.count("observed checksums of 20 parameters") == 3
    (stats_file,) = tmp_path.glob("logs/*/tiny/test/stats.jsonl")
    stats = read_stats(stats_file)
    written = (stats_file.parent / "config.json").read_text()
    assert json.loads(written)["actor"]["kl_ctl"] == 0.05
    assert "secret" not in written
    assert [line["step"] for line in stats] == [0, 1, 2]
    # The policy starts as the reference and diverges from it.
    assert abs(stats[0]["ppo_actor/kl_rewards/avg"]) < 1e-6
    assert abs(stats[2]["ppo_actor/kl_rewards/avg"]) > 1e-6
    assert abs(stats[0]["ppo_actor/update/importance_weight/avg"] - 1) < 0.05

    saved, last = sorted(tmp_path.glob("checkpoints/*/tiny/test/default/*"))
    assert (saved.name, last.name) == ("globalstep1", "globalstep2")  # every second step, and the last one
    trained, initial = (AutoModelForCausalLM.from_pretrained(path) for path in (saved, tiny_model))
    assert not torch.equal(trained.lm_head.weight, initial.lm_head.weight)
    assert AutoTokenizer.from_pretrained(saved).encode("1+2") == AutoTokenizer.from_pretrained(
        tiny_model
    ).encode("1+2")

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [round(event.value, 5) for event in events.Scalars("ppo_actor/task_reward/avg")]
    assert rewards == [round(line["ppo_actor/task_reward/avg"], 5) for line in stats]


def test_flags_may_be_given_with_and_without_the_name_of_the_script(tiny_model, tmp_path):
    from areal_core.config import GRPOConfig
    from areal_debug.wiring import wire

    own = ("--config", str(HERE / "tiny.yaml"), "--dump-rollout", str(tmp_path / "record"))
    paths = (f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "deterministic=false")
    for argv in ((*own, *paths), ("script.py", *own, *paths)):
        config, hooks = wire(argv, GRPOConfig)
        assert config.debug.path == str(tmp_path / "record")
        assert config.deterministic is False  # the user's own option comes last
        assert [make.__name__ for make in hooks["observers"]] == ["make_recorder", "make_seam_check"]

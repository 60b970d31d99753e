"""Statistics of a step: masks, scopes, ranks with different names, and loggers."""

import asyncio
import json
import math

import pytest
import torch

from areal_core.telemetry.loggers import JsonlLogger, StatsLogger, TensorBoardLogger, read_stats, step_summary
from areal_core.telemetry.stats import Reduce, Stats


def test_statistics_are_taken_over_the_mask():
    stats = Stats()
    stats.denominator(n_tokens=torch.tensor([True, True, False]))
    stats.stat("n_tokens", entropy=torch.tensor([1.0, 3.0, float("nan")]))
    stats.stat("n_tokens", Reduce.AVG, ratio=torch.tensor([1.0, 2.0, 9.0]))
    stats.stat("n_tokens", Reduce.SUM, total=torch.tensor([1.0, 2.0, 9.0]))
    assert stats.export() == {
        "entropy/avg": 2.0, "entropy/max": 3.0, "entropy/min": 1.0, "n_tokens": 2.0, "ratio": 1.5, "total": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 3 * 2**15 + 7), (0, 4), (3, 0)])
def test_large_and_empty_tensors_are_reduced_completely(shape):
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) < 0.5
    stats = Stats()
    stats.denominator(n=mask)
    stats.stat("n", x=torch.where(mask, values, float("nan")))
    exported = stats.export()
    assert exported["n"] == mask.sum()
    if mask.any():
        chosen = values[mask].double()
        assert exported["x/avg"] == pytest.approx(chosen.mean().item(), rel=1e-12)
        assert (exported["x/min"], exported["x/max"]) == (chosen.min(), chosen.max())
    else:
        assert set(exported) == {"n"}


def test_micro_batches_weigh_by_their_tokens():
    stats = Stats()
    for mask, values in (([True, True, True], [1.0, 1.0, 1.0]), ([True], [5.0])):
        stats.denominator(n=torch.tensor(mask))
        stats.stat("n", loss=torch.tensor(values))
    exported = stats.export()
    assert exported["loss/avg"] == 2.0  # 8 / 4, not (1 + 5) / 2
    assert exported["n"] == 4.0


def test_names_carry_their_scopes_and_find_outer_masks():
    stats = Stats()
    with stats.scope("ppo_actor"):
        stats.denominator(n_seqs=torch.tensor([True]))
        with stats.scope("update"):
            stats.stat("n_seqs", Reduce.AVG, x=torch.tensor([2.0]))
            stats.scalar(lr=0.1)
            with stats.timing("train_step"):
                pass
    exported = stats.export()
    assert exported["ppo_actor/update/x"] == 2.0
    assert exported["ppo_actor/update/lr"] == 0.1
    assert exported["ppo_actor/update/lr__count"] == 1.0
    assert 0.0 <= exported["timeperf/train_step"] < 1.0
    assert len(exported) == 5


def test_scopes_of_tasks_that_take_turns_do_not_mix():
    stats = Stats()

    async def episode(name):
        with stats.scope(name):
            await asyncio.sleep(0)
            stats.scalar(reward=1.0)
            await asyncio.sleep(0)

    async def run():
        await asyncio.gather(episode("a"), episode("b"))

    asyncio.run(run())
    assert set(stats.export()) == {"a/reward", "a/reward__count", "b/reward", "b/reward__count"}


def test_scalars_average_over_calls_in_full_precision():
    stats = Stats()
    stats.scalar(loss=0.1)
    stats.scalar(loss=torch.tensor(0.3, dtype=torch.float64))
    assert stats.export() == {"loss": 0.4 / 2, "loss__count": 2.0}


def test_empty_mask_leaves_its_statistics_out():
    stats = Stats()
    stats.denominator(n_correct=torch.zeros(3, dtype=torch.bool), n_none=torch.zeros(0, dtype=torch.bool))
    stats.stat("n_correct", seq_len=torch.ones(3))
    stats.stat("n_none", other=torch.ones(0))
    assert stats.export() == {"n_correct": 0.0, "n_none": 0.0}


def test_export_clears_the_records():
    stats = Stats()
    stats.scalar(x=1.0)
    stats.export()
    assert stats.export() == {}
    with pytest.raises(ValueError, match=r"there is no denominator 'n' in scope ''"):
        stats.stat("n", x=torch.ones(1))


def test_wrong_shapes_and_dtypes_are_refused_by_name():
    stats = Stats()
    with pytest.raises(ValueError, match=r"denominator 'n' has dtype torch.int32; expected torch.bool"):
        stats.denominator(n=torch.ones(2, dtype=torch.int32))
    stats.denominator(n=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"stat 'x' has shape \[3\] and its denominator 'n' \[2\]"):
        stats.stat("n", x=torch.ones(3))


def test_ranks_with_different_names_are_joined():
    ours, theirs = Stats(), Stats()
    for stats, mask, values in ((ours, [True, False], [1.0, 0.0]), (theirs, [True, True], [4.0, 7.0])):
        stats.denominator(n=torch.tensor(mask))
        stats.stat("n", x=torch.tensor(values))
    ours.scalar(only_ours=1.0)
    theirs.scalar(only_theirs=2.0)
    exchanged = []

    def send(records):
        exchanged.append(records)
        return [records]

    theirs.export(send)
    assert ours.export(lambda records: [records, exchanged[0]]) == {
        "n": 3.0, "only_ours": 1.0, "only_ours__count": 1.0, "only_theirs": 2.0, "only_theirs__count": 1.0,
        "x/avg": 4.0, "x/max": 7.0, "x/min": 1.0,
    }  # fmt: skip


RANKS = """
import json, torch, torch.distributed as dist
from areal_core.telemetry.stats import Stats
dist.init_process_group("gloo")
stats, rank = Stats(), dist.get_rank()
stats.denominator(n=torch.tensor([True, rank == 0]))
if rank == 0:
    stats.stat("n", x=torch.tensor([1.0, 2.0]))
else:
    stats.scalar(only_here=5.0)
exported = stats.export()
everywhere = [None, None]
dist.all_gather_object(everywhere, exported)
if rank == 0:
    print(json.dumps(everywhere))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_real_ranks_with_different_names_agree(torchrun, tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    first, second = torchrun(program, 2)
    assert first == second
    assert first == {
        "n": 3.0,
        "only_here": 5.0,
        "only_here__count": 1.0,
        "x/avg": 1.5,
        "x/max": 2.0,
        "x/min": 1.0,
    }


def test_jsonl_reads_back_to_the_same_bits(tmp_path):
    stats = {"a": 0.1 + 0.2, "b": 5e-324, "c": -0.0, "d": math.inf, "e": math.nan, "f": 1e22}
    path = tmp_path / "logs" / "stats.jsonl"
    log = JsonlLogger(path)
    log(0, stats)
    log(1, {"a": 1.0})
    lines = path.read_text().splitlines()  # before it is closed: a killed run keeps its lines
    log.close()
    assert json.loads(lines[0], parse_constant=pytest.fail)["d"] == "inf"
    read = read_stats(path)
    assert [row["step"] for row in read] == [0.0, 1.0]
    assert {name: read[0][name].hex() for name in stats} == {
        name: value.hex() for name, value in stats.items()
    }


def test_tensorboard_discards_steps_that_are_repeated(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, value in ((0, 0.5), (2, 0.25)):
        log = TensorBoardLogger(tmp_path, first_step)
        for step in range(first_step, 4):
            log(step, {"loss": value})
        log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.5), (1, 0.5), (2, 0.25), (3, 0.25)]


def test_only_rank_0_logs_and_only_when_it_is_time(tmp_path):
    seen = []
    for rank in (0, 1):
        with StatsLogger(
            [], [lambda step, stats, rank=rank: seen.append((rank, step))], rank, every_steps=2
        ) as logger:
            for step in range(5):
                logger.commit(step, {})
    assert seen == [(0, 1), (0, 3)]


def test_summary_shows_what_was_measured():
    stats = {
        "ppo_actor/task_reward/avg": 0.25, "ppo_actor/update/loss": -0.0123456,
        "ppo_actor/update/actor_loss/avg": 9.0, "ppo_actor/update/grad_norm": 1.5,
        "ppo_actor/update/lr": 1e-5, "ppo_actor/seq_len/avg": 41.6, "ppo_actor/n_tokens": 3000.0,
    }  # fmt: skip
    line = step_summary(2, stats, total_steps=10, seconds=2.0)
    assert (
        line
        == "step 2 (3 of 10)  reward 0.250  loss -0.01235  grad_norm 1.5  lr 1.00e-05  seq_len 42  1500 tokens/s"
    )
    assert step_summary(0, {"sft/loss/avg": 2.0}) == "step 0  loss 2"

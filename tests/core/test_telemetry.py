"""Statistics of a step: masks, scopes, ranks with different names, and loggers."""

import asyncio
import json
import math

import pytest
import torch

from areal_core.telemetry.loggers import JsonlLogger, TensorBoardLogger, read_stats
from areal_core.telemetry.stats import Stats


def test_micro_batches_weigh_by_their_tokens():
    stats = Stats()
    for mask, values in (([True, True, True], [1.0, 1.0, 1.0]), ([True], [5.0])):
        stats.denominator(n=torch.tensor(mask))
        stats.stat("n", loss=torch.tensor(values))
    exported = stats.export()
    assert exported["loss/avg"] == 2.0  # 8 / 4, not (1 + 5) / 2
    assert exported["n"] == 4.0


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


def test_empty_mask_leaves_its_statistics_out():
    stats = Stats()
    stats.denominator(n_correct=torch.zeros(3, dtype=torch.bool), n_none=torch.zeros(0, dtype=torch.bool))
    stats.stat("n_correct", seq_len=torch.ones(3))
    stats.stat("n_none", other=torch.ones(0))
    assert stats.export() == {"n_correct": 0.0, "n_none": 0.0}


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

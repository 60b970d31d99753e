"""A step that depends on its layout is named with its factor; ours does not."""

import pytest
import torch

from areal_core.engine.ranks import leave_ranks
from areal_core.trainer import objective
from areal_core.trainer.build import start_process
from areal_core.trainer.objective import PolicyObjective
from areal_debug.rank_tasks.on_rank import record_again
from replayer.crosscheck.layouts import name_factor
from replayer.invariance import LAYOUTS, assert_invariant, run_layouts
from replayer.request import Request
from replayer.run import build_trainer
from replayer.virtual_ranks import VirtualRanks, run_as_ranks

MASK = torch.tensor([1] * 29 + [0] * 3).reshape(8, 4)
BATCH = {"input_ids": torch.arange(1, 33).reshape(8, 4), "loss_mask": MASK}
MEANS = "a mean over the micro-batches of their own means"


def total_of(parts):
    return sum(float((part["input_ids"] * part["loss_mask"]).sum()) for part in parts)


def mean_of(parts):
    return total_of(parts) / sum(float(part["loss_mask"].sum()) for part in parts)


def test_a_step_that_is_divided_by_all_tokens_is_invariant():
    assert_invariant(lambda parts: {"loss": mean_of(parts)}, BATCH)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda parts: mean_of(parts) / len(parts),
            r"accumulation 4: loss is .*: divided by the micro-batches",
        ),
        (
            lambda parts: sum(mean_of([part]) for part in parts) / len(parts),
            f"2: loss is .*: {MEANS}\n.*: {MEANS}",
        ),
        # each row sees those before it
        (
            lambda parts: total_of([{k: v.cumsum(0) for k, v in part.items()} for part in parts]),
            "rows packed in one",
        ),
    ],
)
def test_a_loss_that_depends_on_the_layout_is_named(loss, says):
    with pytest.raises(AssertionError, match=says):
        assert_invariant(lambda parts: {"loss": loss(parts)}, BATCH)


@pytest.fixture(scope="module")
def records(tiny_run, tmp_path_factory):
    """A record of one rank, and one of two with its rows, each with the order of the sums."""
    two = str(tmp_path_factory.mktemp("two") / "record")
    request = Request(tiny_run.path, 0, 0, settings=("allocation_mode=fsdp:d2",), record_to=two)

    def train(join):
        with build_trainer(request, [record_again], join=join) as trainer:
            trainer.train()

    run_as_ranks(2, start_process, train, as_gloo=True)
    leave_ranks()
    return {1: (tiny_run.path, ""), 2: (two, "gloo")}


LOSS, NORMALIZE = PolicyObjective.loss, objective.normalize_tokens


def by_rows(self, logprobs, entropy, flat):
    return LOSS(self, logprobs, entropy, flat) * (len(flat["cu_seqlens"]) - 1)


def by_tokens(self, logprobs, entropy, flat):
    return LOSS(self, logprobs, entropy, flat) / flat["loss_mask"].sum()


def of_own_rows(*given, sum_over_ranks, **more):
    return NORMALIZE(*given, sum_over_ranks=lambda of_rank: of_rank, **more)


BUGS = {
    "none": ([], {}),
    "rows": (
        [(PolicyObjective, "loss", by_rows)],
        {("accumulation 4", "loss"): "divided by the micro-batches"},
    ),
    "forgotten ranks": (
        [(VirtualRanks, "num_summed", 1)],
        {("2 ranks", "grad_norm"): "divided by the ranks"},
    ),
    "means": (
        [(PolicyObjective, "loss", by_tokens), (PolicyObjective, "denominator", lambda *_: torch.ones(()))],
        {("2 ranks", "loss"): "a mean over the ranks of their own means", ("accumulation 2", "loss"): MEANS},
    ),
    "whitened by ranks": (
        [(objective, "normalize_tokens", of_own_rows)],
        {(None, "advantage"): "it is not computed from the rows of all ranks"},
    ),
}


# The names of the long ones are those of toy losses above, or of a ratio below.
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] * (bug != "none")) for bug in BUGS],
)
def test_a_recorded_step_is_the_same_in_every_layout_but_for_a_bug(records, monkeypatch, num_ranks, bug):
    changes, wanted = BUGS[bug]
    for place, name, change in changes:
        monkeypatch.setattr(place, name, change)
    path, virtual = records[num_ranks]
    found = run_layouts(path, 0, virtual=virtual)
    named = {(one.layout, one.what.split(" of ")[0]): one.named for _, one in found.variants}
    assert found.layouts == ("1 rank", *LAYOUTS[1:], "2 ranks", "2 ranks with accumulation 4")
    assert (named == {}) == (bug == "none")
    assert found.faithful or bug != "none"
    other = {1: "2 ranks", 2: "1 rank"}[num_ranks]
    assert {(layout, what): named.get((layout or other, what)) for layout, what in wanted} == wanted


def test_a_ratio_is_looked_up_among_the_counts_of_two_layouts():
    one = {"micro-batches": 1, "ranks": 1, "rows of a group": 6, "tokens of a row": 40.3}
    other = one | {"micro-batches": 4, "ranks": 2}
    named = [name_factor(ratio, one, other) for ratio in (1 / 8, 12, 1 / 6, 2.5)]
    products = [
        "divided by the micro-batches times the ranks",
        "multiplied by the ranks times the rows of a group",
    ]
    assert named == [*products, "divided by the rows of a group", "no count of the layouts"]

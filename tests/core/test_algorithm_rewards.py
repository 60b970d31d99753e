"""Alignment, reward shaping, KL and normalisation, against literal numbers and float64 numpy."""

import threading

import numpy as np
import pytest
import torch

from areal_core.algorithm.advantages import groups_without_spread, kl_estimate
from areal_core.algorithm.alignment import to_next_token
from areal_core.algorithm.normalization import normalize_groups, normalize_tokens


def test_mask_logprobs_and_versions_move_together():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.25]]),
        "versions": torch.tensor([[-1, -1, 3, 4]], dtype=torch.int32),
    }
    aligned = to_next_token(batch)
    assert aligned["loss_mask"].tolist() == [[0, 1, 1, 0]]
    assert aligned["logprobs"].tolist() == [[0.0, -0.5, -0.25, 0.0]]
    assert aligned["versions"].tolist() == [[-1, 3, 4, -1]]
    assert aligned["input_ids"] is batch["input_ids"]
    assert aligned["loss_mask"].dtype == aligned["versions"].dtype == torch.int32
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1]]


def test_a_group_is_without_spread_where_all_its_samples_earn_the_same():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 2.0, 0.0]), torch.tensor([5, 9, 5, 7, 9])
    alike, several = groups_without_spread(rewards, groups)  # of groups 5, 7, 9
    assert (alike.tolist(), several.tolist()) == ([True, True, True], [True, False, True])
    assert groups_without_spread(rewards, torch.tensor([5, 5, 5, 7, 9]))[0].tolist() == [False, True, True]


def test_kl_estimate_is_clamped_and_its_name_checked():
    far = torch.tensor([50.0]), torch.tensor([0.0])
    assert kl_estimate(*far, "k1").tolist() == [10.0]
    assert kl_estimate(far[1], far[0], "k1").tolist() == [-10.0]
    with pytest.raises(ValueError, match="'k4' is unknown"):
        kl_estimate(*far, "k4")


@pytest.mark.parametrize("mean_level", ["group", "batch", None])
@pytest.mark.parametrize("std_level", ["group", None])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_constant_group_never_blows_up(mean_level, std_level, unbiased, leave_one_out):
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([0, 0, 0, 1])
    got = normalize_groups(
        rewards,
        groups,
        mean_level=mean_level,
        std_level=std_level,
        unbiased=unbiased,
        leave_one_out=leave_one_out,
    )
    assert got.abs().max() <= 1.0
    if mean_level == "group" or std_level == "group":
        assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def normalised_by_numpy(x, groups, mean_level, std_level, leave_one_out, unbiased, eps):
    out = np.zeros(len(x))
    for i in range(len(x)):
        sets = {"batch": np.arange(len(x)), "group": np.flatnonzero(groups == groups[i])}
        mean = 0.0
        if mean_level is not None:
            rows = sets[mean_level]
            rows = rows[rows != i] if leave_one_out else rows
            mean = x[rows].mean()
        out[i] = x[i] - mean
        if std_level is not None:
            out[i] /= x[sets[std_level]].std(ddof=int(unbiased)) + eps
    return out


@pytest.mark.parametrize("mean_level", ["group", "batch", None])
@pytest.mark.parametrize("std_level", ["group", "batch", None])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("unbiased", [True, False])
def test_normalisation_equals_numpy(mean_level, std_level, leave_one_out, unbiased):
    random = np.random.default_rng(5)
    x, groups = (
        random.normal(3.0, 2.0, 23).astype(np.float32),
        random.permutation([0] * 5 + [1] * 2 + [8] * 16),
    )
    arguments = (mean_level, std_level, leave_one_out, unbiased, 1e-5)
    got = normalize_groups(
        torch.from_numpy(x), torch.from_numpy(groups), mean_level=mean_level, std_level=std_level,
        leave_one_out=leave_one_out, unbiased=unbiased,
    )  # fmt: skip
    np.testing.assert_allclose(
        got.numpy(), normalised_by_numpy(x.astype(float), groups, *arguments), rtol=1e-5
    )


def test_padding_and_rows_of_other_groups_change_no_bit_of_normalised_tokens():
    generator = torch.Generator().manual_seed(2)
    values, mask = torch.randn(6, 2500, generator=generator), torch.rand(6, 2500, generator=generator) < 0.8
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    levels = {"mean_level": "group", "std_level": "group"}
    whole = normalize_tokens(values, mask, group_ids=groups, **levels)
    wider = [torch.nn.functional.pad(x, (0, 777)) for x in (values, mask)]
    assert torch.equal(normalize_tokens(*wider, group_ids=groups, **levels)[:, :2500], whole)
    alone = normalize_tokens(values[2:4], mask[2:4], group_ids=groups[2:4], **levels)
    assert torch.equal(alone, whole[2:4])
    batch = normalize_tokens(values, mask)
    assert torch.equal(normalize_tokens(*wider)[:, :2500], batch)
    chosen = values[mask].double()
    expected = (values.double() - chosen.mean()) / (chosen.std() + 1e-5)
    torch.testing.assert_close(batch, torch.where(mask, expected, 0.0).float())


class ThreadRanks:
    """`sum_over_ranks` for threads that act as ranks.

    Like a collective, each call waits for the other ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=10)
        self.slots: list = [None] * num_ranks

    def run(self, function, arguments):
        results = [None] * len(arguments)

        def rank(index):
            def sum_over_ranks(values):
                self.slots[index] = values
                self.barrier.wait()
                total = torch.stack(self.slots).sum(0)
                self.barrier.wait()
                return total

            results[index] = function(*arguments[index], sum_over_ranks=sum_over_ranks)

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(arguments))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(result is not None for result in results), "a rank did not come back"
        return results


def test_ranks_together_give_what_one_rank_gives_also_if_one_has_an_empty_mask():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(4, 6, generator=generator), torch.rand(4, 6, generator=generator) < 0.5
    alone = normalize_tokens(values, mask)
    parts = ThreadRanks(2).run(normalize_tokens, [(values[:3], mask[:3]), (values[3:], mask[3:])])
    torch.testing.assert_close(torch.cat(parts), alone, rtol=1e-6, atol=1e-6)
    values = torch.tensor([[1.0, 3.0, 5.0]])
    full, empty = ThreadRanks(2).run(
        normalize_tokens, [(values, torch.ones(1, 3)), (torch.zeros(2, 4), torch.zeros(2, 4))]
    )
    torch.testing.assert_close(full, torch.tensor([[-1.0, 0.0, 1.0]]), rtol=1e-4, atol=1e-6)
    assert empty.tolist() == torch.zeros(2, 4).tolist()

"""The pattern of a difference: claimed where the numbers prove it, and nowhere else."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from recorder import open_record
from recorder.testing import scripted_batch, scripted_learning
from recorder.trainers.recorder import Recorder
from replayer.compare.patterns import causal_tensor, find_pattern, recognise
from replayer.compare.relations import EPSILON, Pairs, Pattern, pair_of
from replayer.compare.stages import StageDifference, compare_steps

from .test_diff import Script, record

ARITHMETIC = {"scaled", "offset", "shifted", "permuted"}


def pairs_of(left, right, *, known=None, ranks=None, per_token=True, is_category=False) -> Pairs:
    """Build pairs from a list of rows of each side, in float32 or integers."""
    rows = []
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        pair = pair_of(ranks[number] if ranks else 0, number, (number // 4, number % 4), a, b)
        wide = np.float64 if a.dtype.kind == "f" else np.int64
        pair = replace(pair, left=a.astype(wide), right=b.astype(wide))
        if known is not None:
            pair = replace(pair, known=known[number], differs=pair.differs & known[number])
        rows.append(pair)
    epsilon = EPSILON["F32"] if left[0].dtype.kind == "f" else 0.0
    return Pairs(rows, epsilon, is_category, per_token, in_prompt=False, num_ranks=len(set(ranks or [0])))


def random_rows(seed=0, num_rows=16, length=12):
    """Float32 rows that are 0 in their first third, as outside of a loss mask."""
    rows = np.random.default_rng(seed).normal(size=(num_rows, length)).astype(np.float32)
    rows[:, : length // 3] = 0
    return list(rows)


def found(left, right, **options) -> tuple[str, float | None] | None:
    pattern = recognise(pairs_of(left, right, **options))
    return None if pattern is None else (pattern.kind, pattern.value)


# How it differs


@given(
    arrays.arrays(np.float32, (6, 10), elements=st.floats(-100, 100, width=32), unique=True),
    st.floats(-8, 8, width=32),
)
def test_a_constant_factor_of_at_least_three_values_is_scaled(values, factor):
    values = values[:, np.abs(values).min(axis=0) > 1e-3]
    if values.shape[1] == 0 or abs(factor - 1) < 1e-3 or abs(factor) < 1e-3:
        return
    kind, value = found(list(values), list(values * np.float32(factor)))
    assert (kind, value) == ("scaled", pytest.approx(factor, rel=1e-6))


@given(st.integers(0, 2**32 - 1), st.floats(-50, 50, width=32))
def test_a_constant_that_is_added_is_an_offset(seed, added):
    values = random_rows(seed)
    if abs(added) < 0.01:
        return
    inside = [row != 0 for row in values]
    moved = [np.where(where, row + np.float32(added), row) for row, where in zip(values, inside, strict=True)]
    kind, value = found(values, moved)
    assert (kind, value) == ("offset", pytest.approx(added, abs=1e-4))


@given(st.integers(0, 2**32 - 1), st.integers(-8, 8).filter(bool))
def test_rows_that_are_moved_are_shifted(seed, shift):
    tokens = np.random.default_rng(seed).integers(0, 10**6, (4, 40))
    moved = [np.roll(row, shift) for row in tokens]
    for row in moved:  # what enters at the end is new
        row[:shift] if shift > 0 else row[shift:]
        row[slice(0, shift) if shift > 0 else slice(shift, None)] = -1
    assert found(list(tokens), moved, is_category=True) == ("shifted", shift)


def test_a_token_that_is_inserted_shifts_what_follows():
    rng = np.random.default_rng(1)
    prompts = [rng.integers(10, 500, 12) for _ in range(4)]
    longer = [np.concatenate([prompt[:3], [7], prompt[3:]]) for prompt in prompts]
    assert found(prompts, longer, is_category=True) == ("shifted", 1)
    assert found(longer, prompts, is_category=True) == ("shifted", -1)


@given(st.integers(0, 2**32 - 1))
def test_the_same_values_in_another_order_are_permuted(seed):
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=12).astype(np.float32) for _ in range(4)]
    assert found(values, [row[::-1].copy() for row in values])[0] == "permuted"
    rewards = [row[:1] for row in values]
    order = [1, 0, 3, 2]
    assert found(rewards, [rewards[n] for n in order], per_token=False) == ("permuted", 4)


def test_another_support_is_named_with_its_tokens():
    values = random_rows()
    shorter = [np.where(np.arange(12) == 4, np.float32(0), row) for row in values]
    why = "nonzero only in A: 16 tokens; only in B: 0; in both: 112, equal"
    assert recognise(pairs_of(values, shorter)) == Pattern("other support", why)
    inverted = [np.where(row == 0, np.float32(1), np.float32(0)) for row in values]
    assert recognise(pairs_of(values, inverted)).kind == "other support"
    none = [np.zeros_like(row) for row in values]
    assert recognise(pairs_of(values, none)).why == "B is 0 at all 128 tokens where A is not"


def test_rounding_is_named_with_its_size():
    rng = np.random.default_rng(3)
    values = random_rows()
    ulps = [row * (1 + rng.integers(-4, 5, row.shape) * np.float32(2.0**-23)) for row in values]
    pattern = recognise(pairs_of(values, [row.astype(np.float32) for row in ulps]))
    assert pattern.kind == "rounding"
    assert "float32 rounding" in pattern.why
    assert 0.1 < pattern.value < 4
    coarse = [row * (1 + rng.uniform(-1, 1, row.shape) * 2.0**-9) for row in values]
    pattern = recognise(pairs_of(values, [row.astype(np.float32) for row in coarse]))
    assert pattern.kind == "rounding"
    assert "bfloat16 rounding" in pattern.why
    cut = [(row.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32) for row in values]
    assert "B is A rounded to bfloat16 in 128 of 128" in recognise(pairs_of(values, cut)).why


def test_a_small_change_in_one_direction_is_no_rounding():
    values = random_rows()
    rng = np.random.default_rng(4)
    larger = [(row + np.abs(row) * rng.uniform(0.5, 1, row.shape) * 2.0**-10) for row in values]
    assert found(values, [row.astype(np.float32) for row in larger]) is None


def test_what_is_not_finite_on_one_side_is_named():
    values = random_rows()
    broken = [np.where(np.arange(12) == 5, np.float32(np.nan), row) for row in values[:3]] + values[3:]
    why = "3 of 3 values that differ are not finite in B only"
    assert recognise(pairs_of(values, broken)) == Pattern("not finite", why)


def test_a_factor_beside_a_small_addend_is_scaled_about():
    rng = np.random.default_rng(5)
    values = [rng.uniform(0.2, 0.8, 8).astype(np.float32) for _ in range(3)]
    rest = [(rng.normal(size=8) * 1e-5).astype(np.float32) for _ in range(3)]
    halves = [row * np.float32(0.5) + addend for row, addend in zip(values, rest, strict=True)]
    pattern = recognise(pairs_of(values, halves))
    assert (pattern.kind, pattern.value) == ("scaled", pytest.approx(0.5, rel=1e-4))
    assert pattern.why.startswith("B is about 0.5 x A in 24 of 24")
    assert found([row[:3] for row in values[:2]], [row[:3] for row in halves[:2]]) is None  # of six values


# What is not claimed


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
def test_unrelated_numbers_have_no_arithmetic_pattern(seed, num_rows, per_token):
    length = 9 if per_token else 1
    left, right = (random_rows(seed + n, num_rows, length) for n in (0, 1))
    answer = found(left, right, per_token=per_token)
    assert answer is None or answer[0] not in ARITHMETIC


@given(st.integers(0, 2**32 - 1), st.integers(2, 50), st.integers(1, 8))
def test_unrelated_tokens_are_replaced_or_nothing(seed, vocabulary, num_rows):
    left, right = np.random.default_rng(seed).integers(0, vocabulary, (2, num_rows, 14))
    answer = None if (left == right).all() else found(list(left), list(right), is_category=True)
    assert answer is None or answer[0] in {"replaced", "one row", "later rows"} or vocabulary < 5


@pytest.mark.parametrize("factor", [2.0, -1.0, 0.25])
def test_two_values_do_not_prove_a_factor(factor):
    row = np.array([0, 0, 1.5, 2.5, 1.5, 2.5], np.float32)
    assert found([row], [row * np.float32(factor)]) is None
    assert found([row] * 3, [row * np.float32(factor)] * 3) is None


def test_a_mask_with_one_token_less_is_not_shifted():
    masks = [np.array([0] * start + [1] * 5 + [0], np.int32) for start in (3, 4, 5, 6)]
    fewer = [mask.copy() for mask in masks]
    for mask, start in zip(fewer, (3, 4, 5, 6), strict=True):
        mask[start] = 0
    assert found(masks, fewer)[0] == "other support"


@given(st.integers(0, 2**32 - 1))
def test_unknown_values_change_nothing(seed):
    rng = np.random.default_rng(seed)
    values = random_rows(seed)
    scaled = [row * np.float32(1.5) for row in values]
    known = [rng.random(12) < 0.7 for _ in values]
    for row, where in zip(scaled, known, strict=True):
        row[~where] = np.nan
    assert found(values, scaled, known=known) == ("scaled", pytest.approx(1.5))


# Where it differs


def test_one_rank_is_named_with_what_happened_there():
    values = random_rows()
    ranks = [number % 2 for number in range(16)]
    doubled = [row * 2 if rank else row for row, rank in zip(values, ranks, strict=True)]
    pattern = recognise(pairs_of(values, doubled, ranks=ranks))
    assert (pattern.kind, pattern.value) == ("one rank", 1)
    assert "only rows of rank 1 differ, 8 of 8; 8 of other ranks are equal: B is 2 x A" in pattern.why


# In records


class Rank(Script):
    """Eight rows of one rank, each of a micro-batch of its own, and the tensors of two layers."""

    def __init__(self, step, rank):
        super().__init__(step)
        self.batch = scripted_batch([7, 9, 6, 8, 7, 9, 10, 8], seed=rank)
        self.batch["rewards"] = (np.arange(8) / 7).astype(np.float32)
        self.batch["prompt_id"] = 100 * rank + np.arange(8, dtype=np.int64) // 2
        self.learning = scripted_learning(self.batch)
        self.order = [(row, 0.5 + row + rank / 8) for row in range(8)]
        layers = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("q", "k", "v")]
        self.weights = {name: f"{n:08x}" for n, name in enumerate(["embed_tokens", *layers, "norm"])}
        self.own_gradients = dict(self.weights)

    def micro_batches(self, minibatch):
        return [([row], loss) for row, loss in self.order[4 * minibatch :][:4]]

    def gradients(self, minibatch):
        return self.own_gradients


def pattern_in_records(tmp_path, change):
    """Return the causal difference and its pattern of two records, of which B is changed."""
    left = record(tmp_path / "left", 1, script_of=Rank).step(0)
    right = record(tmp_path / "right", 1, lambda step, script: change(script), script_of=Rank).step(0)
    cause = causal_tensor(compare_steps(left, right))
    return cause, find_pattern(left, right, cause)


def test_rows_of_other_prompts_are_shifted(tmp_path):
    def change(script):
        script.batch["prompt_id"] = script.batch["prompt_id"] + 4

    cause, pattern = pattern_in_records(tmp_path, change)
    assert cause.name == "rows"
    assert pattern == Pattern("shifted", "B has prompts 4 to 7 where A has 0 to 3: 4 prompts later", 4)


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ([3, 2, 1, 0, 7, 6, 5, 4], "in each minibatch in reverse order"),
        ([4, 5, 6, 7, 0, 1, 2, 3], "the minibatches in reverse order"),
        ([1, 0, 2, 3, 4, 5, 6, 7], "in another order"),
    ],
)
def test_micro_batches_in_another_order(tmp_path, order, how):
    def change(script):
        script.order = [script.order[n] for n in order]

    cause, pattern = pattern_in_records(tmp_path, change)
    assert cause.name.startswith("rows of rank 0")
    assert pattern == Pattern("same set, other order", f"the same 8 micro-batches, {how}")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["embed_tokens"], ("one tensor", 1)),
        (["layers.1.q"], ("one tensor", 1)),
        (["layers.1.q", "layers.1.v"], ("one layer", 1)),
        (["layers.0.q", "layers.1.v"], ("some tensors", 2)),
        (list(Rank(0, 0).weights), ("every tensor", 8)),
    ],
)
def test_parameters_that_differ(tmp_path, names, expected):
    def change(script):
        script.own_gradients |= dict.fromkeys(names, "ffffffff")

    cause, pattern = pattern_in_records(tmp_path, change)
    assert (cause.stage, cause.minibatch) == ("gradient", 0)
    assert (pattern.kind, pattern.value) == expected


def test_what_others_follow_from_is_the_cause():
    def of(stage, name, minibatch=None):
        return StageDifference(stage, name, 1.0, 2.0, minibatch=minibatch)

    advantages = [of("advantages", name) for name in ("kl_rewards", "total_rewards", "advantages")]
    assert causal_tensor((*advantages, of("loss", "loss of rank 0, micro-batch 0", 0))).name == "kl_rewards"
    loss = [
        of("loss", f"{fact} of rank 0, micro-batch {n}", 0) for n in (0, 1) for fact in ("weight", "loss")
    ]
    assert causal_tensor(
        (loss[1], loss[2], loss[3], of("loss", "rows of rank 0, micro-batch 0", 1))
    ).name == ("weight of rank 0, micro-batch 1")
    assert causal_tensor((of("gradient", "grad_norm", 0), of("gradient", "norm", 0))).name == "norm"
    assert causal_tensor((of("weights", "norm", 0), of("weights", "lr", 0))).name == "lr"


# In records of other trainers


def write_foreign(folder, change=lambda number, sample: sample, order=range(6)):
    """Write one step of another trainer, whose samples are in an order, and open it."""
    rng = np.random.default_rng(7)
    samples = []
    for number in range(6):
        logprobs = -rng.exponential(1.0, 6).astype(np.float32)
        logprobs[number % 3] = np.nan  # not known
        samples.append(
            {
                "prompt_tokens": [5, 6, 7 + number // 2],
                "completion_tokens": [int(token) for token in rng.integers(10, 90, 6)],
                "logprobs": logprobs.tolist(),
                "advantages": rng.normal(size=6).tolist(),
                "reward": 0.5,
                "group": number // 2,
            }
        )
    with Recorder(folder, trainer="theirs", text=False) as recorder:
        recorder.step(0, [change(number, samples[number]) for number in order])
    return open_record(folder).step(0)


def foreign_pattern(tmp_path, change, order=(3, 1, 0, 5, 4, 2)):
    left, right = write_foreign(tmp_path / "a"), write_foreign(tmp_path / "b", change, order)
    both = (True, True)
    cause = causal_tensor(compare_steps(left, right, both))
    return cause.name, find_pattern(left, right, cause, both)


def test_what_another_trainer_does_not_know_is_ignored(tmp_path):
    def change(number, sample):
        values = [value + 0.25 for value in sample["logprobs"]]
        return sample | {"logprobs": [math.nan, *values[1:]]}

    name, pattern = foreign_pattern(tmp_path, change)
    assert (name, pattern.kind) == ("logprobs", "offset")
    assert pattern.value == pytest.approx(0.25, abs=1e-6)


def test_a_sample_that_another_trainer_lacks_is_one_row(tmp_path):
    name, pattern = foreign_pattern(tmp_path, lambda number, sample: sample, (0, 1, 2, 4, 5))
    assert (name, pattern) == ("rows", Pattern("one row", "A has 1 row that B lacks, and all of its", 1))

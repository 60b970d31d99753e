"""Planted faults are named first, clean engines are healthy, missing data is listed."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from consistency import transforms
from consistency.alternatives.probes import cut_prompts, partial_alternatives, prompt_lengths, with_prompts
from consistency.alternatives.variants import variants_of
from consistency.checks import numerics, recognise
from consistency.diagnose import Diagnosis, diagnose, with_derived
from consistency.score import score, scorer_of
from consistency.tensors import evidence
from consistency.tokens import Completion, sequences_from_completions
from consistency.transforms import replay, select_rows

from . import faults
from .faults import CLEAN, FAULTS, Given, World, make_world, moved, stitched, variant, with_transforms
from .models import peaked_model

# A fault of each kind of check; the others are for the long tests, which have other seeds and noise, too.
# What `benchmarks/consistency_faults.py` plants behind a server (test_planted_faults.py) is not here again,
# nor what a test below asks about by itself.
EVERYDAY = {
    *("temperature 0.8 in the engine", "repetition penalty", "likely tokens forbidden"),
    *("constant offset", "base 10", "logprob of the likeliest token", "shift by minus one", "rows mixed up"),
    *("history stripped", "missing BOS", "prompts cut", "last logprob missing", "tool output in the mask"),
    *("stale weights", "added tokens", "one stale worker that reuses prefixes", "decoded tokens"),
}
BY_CAUSE = [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in FAULTS]
# These need all rows, not 6.
WEAK = {"added tokens", "decoded tokens", "logprobs of a draft", "output bias", "two tokens of tool output"}


@functools.cache
def world(name: str = "") -> World:
    """Return the usual world, of the rows that a fault needs."""
    return make_world(0, 0.01, **({} if name in WEAK else {"num_rows": 6}))


@functools.cache
def planted(name: str) -> Given:
    """Return the input of a fault in the usual world. Not to be changed."""
    return FAULTS[name][1](world(name))


def diagnosis_of(given: Given, at: World) -> Diagnosis:
    scores = score(at.trainer, given.sequences, temperature=given.setting.temperature)
    setting = given.setting
    replays = replay(at.trainer, given.sequences, setting.temperature, setting.eos_token_id)
    replays = with_derived(replays, given.sequences)
    return diagnose(given.sequences, scores, setting, replays, given.alternatives)


@functools.cache
def diagnosed(name: str) -> Diagnosis:
    return diagnosis_of(planted(name), world(name))


@pytest.mark.parametrize("name", BY_CAUSE)
def test_planted_fault_is_the_first_cause(name):
    cause = FAULTS[name][0]
    found = diagnosed(name)
    assert found.causes[0].id == cause, [(f.id, f.confidence, f.evidence) for f in found.causes]
    assert found.verdict == ("healthy" if cause == "R57" else "mismatch")
    assert found.causes[0].confidence > 0.5
    assert all(text for text in (found.causes[0].evidence, found.causes[0].refute, found.causes[0].fix))


def test_a_row_without_tokens_has_no_prompt_to_change():
    rows = sequences_from_completions([Completion([5, 6], [7], [-0.5]), Completion([], [], [])])
    assert prompt_lengths(rows).tolist() == [2, 0]
    changed = with_prompts(rows, lambda ids: [4, *ids])
    assert (changed.input_ids.tolist(), changed.cu_seqlens.tolist()) == ([4, 5, 6, 7], [0, 4, 4])


def test_what_leaves_more_than_noise_is_not_sure():
    """Weights drawn again make tokens about as likely as an embedding of zeros does."""
    rows = planted("base 10").sequences
    noise = np.random.default_rng(0).normal(0, 0.15, rows.engine_logprobs.shape)
    given = dataclasses.replace(
        planted("base 10"), sequences=dataclasses.replace(rows, engine_logprobs=rows.engine_logprobs + noise)
    )
    (sure, *_), (first, *_) = diagnosed("base 10").causes, diagnosis_of(given, world("base 10")).causes
    assert (sure.id, first.id) == ("R08", "R08")
    assert sure.confidence > 0.9 > 0.85 >= first.confidence


def test_a_system_prompt_is_left_out_up_to_the_first_message_of_the_user():
    head = [1, 2, 8, 9]  # BOS, begin, user, new line
    for ids in ([1, 2, 7, 9, 5, 3, 2, 8, 9, 4], [*head, 4], [5, *head, 4]):
        assert faults.probes.from_the_user(ids, head) == ([*head, 4] if ids[2] == 7 else ids)


def test_a_window_of_0_is_none():
    assert "a window of 64 tokens" in {one.name for one in variants_of(peaked_model(sliding_window=0))}


def test_a_prompt_of_one_token_is_not_cut():
    one = dataclasses.replace(world(), prompts=world().prompts[:, :1])
    assert cut_prompts(faults.probing(one, one.sample(moved(one.trainer, 0)))) == []


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.003, 0.01, 0.02])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_right_cause_comes_first_in_95_percent_whatever_seed_and_noise(seed, noise):
    at = make_world(seed, noise)
    wrong = []
    for name, (cause, build) in FAULTS.items():
        causes = diagnosis_of(build(at), at).causes
        if not causes or causes[0].id != cause:
            wrong.append((name, [f.id for f in causes]))
    assert len(wrong) <= 0.05 * len(FAULTS), wrong


@pytest.mark.parametrize(("seed", "noise"), [(12, 0.02), pytest.param(13, 0.0, marks=pytest.mark.long)])
def test_clean_engine_is_healthy(seed, noise):
    at = make_world(seed, noise)
    found = diagnosis_of(CLEAN(at), at)
    assert (found.verdict, [f.id for f in found.causes]) == ("healthy", ["R35"])
    assert abs(found.surprise) < 4


def test_logits_that_a_bfloat16_engine_rounds_are_no_fault_beside_as_much_noise():
    at = make_world(0, 0.006, num_rows=6)
    found = diagnosis_of(Given(at.sample(reports=transforms.bfloat16_logits)), at)
    causes = [(f.id, f.fault) for f in found.causes]
    assert (found.verdict, causes) == ("healthy", [("R35", False), ("R37", False)])


@pytest.mark.long
def test_none_of_200_clean_engines_is_accused():
    accused = []
    for seed in range(200):
        at = make_world(1000 + seed, (0.003, 0.01, 0.02, 0.05)[seed % 4])
        found = diagnosis_of(CLEAN(at), at)
        if found.verdict == "mismatch":
            accused.append((seed, [f.id for f in found.causes]))
    assert accused == []


def test_noise_beyond_what_was_published_is_unknown_and_accuses_nobody():
    at = make_world(3, 0.06)
    found = diagnosis_of(CLEAN(at), at)
    assert (found.verdict, found.causes) == ("unknown", ())
    assert "worker: the engine that answered each sequence" in found.missing


def test_stale_weights_without_the_old_checkpoint_are_unknown_and_it_is_requested():
    given = planted("stale weights")
    found = diagnosis_of(Given(given.sequences), world())
    assert found.verdict == "unknown"
    assert found.missing[0] == "the checkpoint before this one (--previous), to recognise stale weights"


def test_one_bad_engine_without_its_column_is_unknown_and_it_is_requested():
    found = diagnosis_of(stitched(lambda row, place: row % 4 == 0)(world()), world())
    assert found.verdict == "unknown"
    assert "record the engine of each sequence (worker)" in found.causes[0].fix


def test_few_tokens_make_a_healthy_verdict_less_sure():
    found = diagnosis_of(Given(select_rows(CLEAN(world()).sequences, np.arange(2))), world())
    assert (found.verdict, found.causes[0].confidence) == ("healthy", 0.75)


LEFT_OUT = "rotary positions without the scaling of the config", "model.layers.*.self_attn.*.bias zero"


@pytest.mark.long  # test_architecture_details.py searches among all variants every day
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_an_engine_leaves_out_of_the_config_is_named(name):
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    model = peaked_model(rope_parameters=scaling, attention_bias=True)
    for number, (key, bias) in enumerate(model.named_parameters()):
        if key.endswith("bias"):
            torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(number))
    at = dataclasses.replace(world(), trainer=scorer_of(model))
    assert {*LEFT_OUT} <= {one.name for one in variants_of(model)}
    assert name in diagnosis_of(variant(name)(at), at).causes[0].evidence


@pytest.mark.parametrize(("name", "cause"), [("missing logprobs", "R60"), ("policy moved", "R57")])
def test_what_explains_the_difference_has_no_second_cause(name, cause):
    assert [finding.id for finding in diagnosed(name).causes] == [cause]


def test_a_tied_output_layer_that_kept_its_values_is_named():
    now = scorer_of(peaked_model(tie_word_embeddings=True))
    old = moved(now, 0)
    engine = dataclasses.replace(now, head=old.head)
    tied_world = dataclasses.replace(world(), trainer=now)
    rows = tied_world.sample(engine)
    rows.engine_logprobs[rows.scored] = score(engine, rows).logprob
    tied = partial_alternatives(faults.probing(tied_world, rows), old)[0]
    assert (tied.cause, tied.name) == ("R26.tied", "the output layer of the previous checkpoint")
    assert np.abs(tied.logprobs - rows.engine_logprobs[rows.scored]).max() < 1e-5


def test_two_faults_at_once_are_both_named():
    rounded = with_transforms(
        reports=transforms.bfloat16_logits, draws=functools.partial(transforms.top_k, top_k=20)
    )(dataclasses.replace(world(), noise=0.002))
    assert {f.id for f in diagnosis_of(rounded, world()).causes if f.fault} == {"R04", "R37"}


def test_a_tensor_without_effect_on_the_tokens_is_no_likelier_than_noise():
    nats, noise = evidence(torch.zeros(4, 4, dtype=torch.double), torch.full((4,), 2.0, dtype=torch.double))
    assert (nats, noise) == (pytest.approx(-4 * np.log(2.0)), 2.0)


@pytest.mark.parametrize(("shared", "excess", "first"), [(0.1, 3, "R33"), (0.1, 0.5, "R12"), (0.9, 3, "R27")])
def test_where_nothing_is_alike_other_weights_or_tokens_are_surer_than_a_bias(shared, excess, first):
    ids = np.repeat(np.arange(30), 20)
    columns = {"sequence": ids, "position": ids, "turn_position": ids, "trainer": np.full(600, -4.7)}
    table = SimpleNamespace(token_id=ids, difference=-1.0 - ids / 10, **columns)
    case = SimpleNamespace(
        unexplained=True,
        table=table,
        scores=SimpleNamespace(logprob=np.full(9, -2.0 - excess), entropy=np.full(9, 2.0)),
        level=0.01,
        mean_abs=2.4,
        setting=SimpleNamespace(added_token_ids=frozenset(), vocabulary_size=100),
        measurement=SimpleNamespace(metrics={"mean_abs": 2.4, "logprob_pearson": shared}),
    )
    found = [finding for finding in (recognise.token_bias(case), recognise.other_checkpoint(case)) if finding]
    assert max(found, key=lambda finding: finding.confidence).id == first


def test_first_tokens_that_are_exact_show_that_only_decoding_differs():
    places, rows = np.tile(np.arange(12), 20), np.repeat(np.arange(20), 12)
    noise = np.random.default_rng(0).normal(0, 0.08, len(rows))
    for size, expected in ((noise * (places > 0), "R43"), (noise, "")):
        table = SimpleNamespace(difference=size, turn_position=places, sequence=rows)
        setting = SimpleNamespace(kv_cache_dtype="int8", has_linear_attention=False)
        case = SimpleNamespace(unexplained=False, explanation=None, level=0.07, table=table, setting=setting)
        found = numerics.only_decoded_tokens_differ(case)
        assert (found.id if found else "") == expected

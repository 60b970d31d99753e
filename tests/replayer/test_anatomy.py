"""The parts of a step's gradient are those of autograd, and terms that train nothing are named."""

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from areal_core.trainer.objective import PolicyObjective
from areal_debug.replay.report import report_of_anatomy
from areal_debug.report.terminal import print_report
from replayer.anatomy import SKETCH_SIZE, Part, remarks_of, sketch
from replayer.explain import Explainer, explain

from .conftest import train_and_record

SKETCH_ERROR = math.sqrt(2 / SKETCH_SIZE)  # standard error of a cosine
KL = {"actor__kl_loss_coef": 0.5, "actor__entropy_coef": 0.01, "actor__eps_clip": 10.0}


class OwnObjective(PolicyObjective):
    """Adds a term that is detached, one that reads the prompt, and one without a name."""

    def loss(self, logprobs, entropy, flat):
        outside = ~flat["loss_mask"].bool()
        detached = self.term("auxiliary", 0.02 * logprobs.detach().sum())
        leak = self.term("leak", (logprobs * outside).sum() + 0.1 * outside.sum())
        return super().loss(logprobs, entropy, flat) + detached + leak + 0.1 * logprobs.square().sum()


def parts_by(found, kind):
    return {(part.minibatch, part.name): part for part in found.parts if part.kind == kind}


def text_of(found, record):
    out = Console(file=io.StringIO(), width=400)
    print_report(out, report_of_anatomy(record, found.to_dict()))
    return out.file.getvalue()


@pytest.fixture(scope="module")
def with_kl(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("anatomy")
    return train_and_record(folder, tiny_model, 2, ref__path=str(tiny_model), ref__dtype="float32", **KL)


def test_terms_and_classes_of_token_add_up_to_the_gradient(with_kl):
    found = explain(with_kl.path, 1, anatomy=True)
    assert found.faithful
    recorded = with_kl.record.step(1).plan(0).details["minibatches"]
    for kind in ("term", "class"):
        parts = parts_by(found, kind)
        for index in range(2):
            shares = [part.gradient_share for (number, _), part in parts.items() if number == index]
            assert sum(shares) == pytest.approx(1, abs=1e-4)
        # <gi, G> is the sum over j of |gi| |gj| cos(i, j): exact on the left, sketched on the right
        for (index, _), part in parts.items():
            sizes = {name: other.gradient_norm for (number, name), other in parts.items() if number == index}
            estimate = part.gradient_norm**2
            estimate += sum(part.gradient_norm * sizes[name] * cos for name, cos in part.cosines.items())
            bound = 4 * SKETCH_ERROR * part.gradient_norm * sum(sizes.values())
            assert abs(estimate - part.gradient_share) < bound
    terms = parts_by(found, "term")
    assert {name for _, name in terms} == {"policy", "kl", "entropy"}
    for index in range(2):
        values = [part.value for (number, _), part in terms.items() if number == index]
        assert sum(values) == pytest.approx(float.fromhex(recorded[index]["loss"]), abs=1e-6)
    assert sum(s.gradient_share for s in found.samples) == pytest.approx(2, abs=1e-3)  # two minibatches
    assert [r for r in found.remarks if r.is_fault] == []
    assert "MoE" not in text_of(found, with_kl.record)


def test_sketched_angles_are_those_of_the_exact_gradients():
    torch.manual_seed(0)
    errors = []
    for _ in range(20):
        left, noise = torch.randn(30_000), torch.randn(30_000)
        right = 0.6 * left + 0.8 * noise
        exact = float(torch.cosine_similarity(left, right, dim=0))
        a, b = sketch([left[:7], left[7:]], 0), sketch([right[:7], right[7:]], 0)
        errors.append(float(torch.cosine_similarity(a, b, dim=0)) - exact)
        assert torch.allclose(a + b, sketch([(left + right)[:7], (left + right)[7:]], 0), atol=1e-3)
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < SKETCH_ERROR
    assert max(map(abs, errors)) < 4 * SKETCH_ERROR


def test_a_detached_term_and_one_outside_of_the_mask_are_named(with_kl, monkeypatch):
    add = Explainer.__init__

    def with_own_objective(explainer, trainer, *rest):
        add(explainer, trainer, *rest)
        own = OwnObjective(**(vars(explainer.objective) | {"stats": explainer.objective.stats}))
        explainer.objective = own

    monkeypatch.setattr(Explainer, "__init__", with_own_objective)
    found = explain(with_kl.path, 1, anatomy=True)
    faults = {(remark.kind, remark.part): remark for remark in found.remarks if remark.is_fault}
    assert set(faults) == {("dead", "auxiliary"), ("dead", "leak"), ("outside", "leak")}
    assert "without a graph" in faults["dead", "auxiliary"].evidence
    assert "tokens outside of the loss mask only" in faults["dead", "leak"].evidence
    unnamed = [part for part in found.parts if part.name == "not named"]
    assert len(unnamed) == 2
    assert all(part.gradient_norm > 0 for part in unnamed)
    text = text_of(found, with_kl.record)
    assert "auxiliary trains nothing" in text
    assert "leak acts outside of the mask" in text


@pytest.mark.long
def test_prompt_tokens_in_the_mask_are_named(tmp_path, tiny_model):
    def leak(batch, step):
        mask = batch["loss_mask"].clone()
        mask[:, 1] = 1  # a token of the prompt
        return batch | {"loss_mask": mask}

    run = train_and_record(
        tmp_path, tiny_model, 1, leak, actor__eps_clip=10.0, actor__use_decoupled_loss=False
    )
    found = explain(run.path, 0, anatomy=True)
    (fault,) = [remark for remark in found.remarks if remark.is_fault]
    assert (fault.kind, fault.part) == ("outside", "prompt")


def test_a_term_that_is_0_or_small_is_not_called_dead():
    part = Part("term", "policy", 0, 0.1, 9, 0, True, 1.0, 1.0)
    small = replace(part, name="entropy", gradient_norm=part.gradient_norm / 5000)
    none = replace(part, name="kl", value=0.0, gradient_norm=0.0)
    kinds = {(remark.kind, remark.part) for remark in remarks_of([part, small, none], "")}
    assert kinds == {("hidden", "entropy"), ("idle", "kl")}

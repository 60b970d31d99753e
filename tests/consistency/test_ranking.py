"""Ranks of sampled tokens and both sides' most likely tokens, on small literal numbers."""

import pytest
import torch

from consistency.report import rank_tokens
from consistency.score import Scores, score_logits


def scores_of(probabilities, labels):
    columns = score_logits(torch.log(torch.tensor(probabilities)), torch.tensor(labels), 1.0, 2)
    return Scores(
        **{
            name: values.double().numpy() if values.is_floating_point() else values.numpy()
            for name, values in columns.items()
        }
    )


SCORES = scores_of([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.4, 0.35, 0.25]], [0, 2, 1])


def test_near_ties_are_distinguished_from_clear_mismatches():
    # The model prefers 0 by ln(5/3) = 0.51, ln 2 = 0.69 and ln(8/7) = 0.13 nats.
    tops = [((0, -0.7), (1, -1.2)), ((1, -0.6), (0, -0.9)), ((1, -0.9), (2, -1.0))]
    found = rank_tokens(SCORES, tops)
    assert found.argmax_mismatch == pytest.approx(2 / 3)
    assert found.clear_mismatch == pytest.approx(1 / 2)
    assert found.jaccard == pytest.approx((1 + 1 + 1 / 3) / 3)


def test_scores_do_not_depend_on_the_rows_that_are_reduced_together():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 1000, generator=generator), torch.randint(0, 1000, (7,))
    together, apart = (score_logits(logits.clone(), labels, 0.7, 5, size) for size in (7, 2))
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in together)
    logprobs = torch.log_softmax(logits.double() / 0.7, 1)
    at_label = logprobs.gather(1, labels[:, None])
    expected = torch.where(logprobs > at_label, logprobs.exp(), 0).sum(1)
    torch.testing.assert_close(together["mass_before"].double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(together["rank"], (logprobs > at_label).sum(1))
    assert torch.equal(score_logits(logits.clone(), labels, 0.7, None)["logprob"], together["logprob"])

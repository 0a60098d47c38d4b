"""Evaluation: means over all test records, whatever the threads."""

from dataclasses import replace

import pytest
import torch
from federations import make_federation
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.execution import evaluation
from asfl_privacy.execution.evaluation import Evaluator


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_accuracy_and_loss_are_means_over_all_test_records_whatever_the_threads(digits, monkeypatch, threads):
    """Catches a last batch that counts as a whole one, a batch left out or counted twice, and the training mode."""
    monkeypatch.setattr(evaluation, "BATCH_SIZE", 100)
    federation = make_federation(digits)
    weights = {name: value * 1.1 for name, value in federation.initial_weights.items()}
    with Evaluator(federation, threads=threads) as evaluator:
        accuracy, loss = evaluator.evaluate(weights, round=1)
    twin = federation.replica()
    twin.load(weights, training=False)
    logits = twin.model(digits.test_inputs.clone())
    assert accuracy == int((logits.argmax(1) == digits.test_labels).sum()) / len(digits.test_labels)
    assert loss == pytest.approx(F.cross_entropy(logits, digits.test_labels).item(), rel=1e-5)
    with Evaluator(federation) as alone:
        assert alone.evaluate(weights, round=1) == (accuracy, loss)


def test_fewer_records_than_threads_are_evaluated_too(digits):
    few = replace(digits, test_inputs=digits.test_inputs[:3], test_labels=digits.test_labels[:3])
    federation = make_federation(few)
    with Evaluator(federation, threads=4) as evaluator:
        accuracy, _ = evaluator.evaluate(federation.initial_weights, round=1)
    federation.load(federation.initial_weights, training=False)
    with torch.no_grad():
        right = (federation.model(few.test_inputs).argmax(1) == few.test_labels).sum()
    assert accuracy == int(right) / 3

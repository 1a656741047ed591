"""The best evaluation of a run."""

from fedpax.run_files.evaluations import BestMetric, Evaluations, parse_best_metric


def test_losses_are_better_if_smaller_and_other_metrics_as_told() -> None:
    assert parse_best_metric("loss") == BestMetric(name="loss", smaller=True)
    assert parse_best_metric("min:perplexity") == BestMetric(name="perplexity", smaller=True)
    assert not parse_best_metric("accuracy").smaller


def test_a_run_without_improvement_tells_the_reason() -> None:
    losses = ((2, 1.5), (4, 1.2), (6, 1.3))
    lines = [{"kind": "evaluation", "round": n, "loss": x} for n, x in losses]
    evaluations = Evaluations(lines, None, stop_after=2)
    assert not evaluations.add(8, {"loss": 1.2})
    assert evaluations.best_round == 4
    assert evaluations.reason == (
        "the held-out loss has not improved on 1.2000, of round 4, in 2 evaluations"
    )

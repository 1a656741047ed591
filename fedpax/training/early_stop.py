"""After evaluations: keep the best model, and end a run that no longer improves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.exports import Exports
from fedpax.processes.communication import gather_json
from fedpax.run_files.evaluations import STOP, Evaluations
from fedpax.run_files.metrics import MetricsWriter
from fedpax.run_files.paths import CHECKPOINTS, complete_rounds
from fedpax.training.experiment import HeldoutMetrics
from fedpax.training.round_logger import as_floats
from fedpax.training.training_config import TrainingConfig


class EarlyStop:
    """Decides after evaluations what to save, and when to stop."""

    def __init__(
        self, training: TrainingConfig, saved_in: Path, checkpoints: Checkpoints, exports: Exports
    ) -> None:
        self._training, self._saved_in = training, saved_in
        self._checkpoints, self._exports = checkpoints, exports
        self._kept: Sequence[Mapping[str, Any]] = ()

    def start(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Begin with the evaluations that are logged already."""
        training, self._kept = self._training, kept
        self._evaluations = Evaluations(kept, training.keep_best, training.stop_after)
        saved = (
            complete_rounds(self._saved_in / CHECKPOINTS) if training.keep_best is not None else []
        )
        if jax.process_count() > 1:
            saved = gather_json(saved)[0]
        # A better model may not have been kept, if `keep_best` was set later.
        logged = [line for line in kept if line["round"] in saved]
        self._saved = Evaluations(logged, training.keep_best, 0)
        self._checkpoints.keep_best(self._saved.best_round)

    def check_metric(self, evaluate: Callable[[], HeldoutMetrics]) -> None:
        """Check that an evaluation has the metric `keep_best`, before a round is trained."""
        # The first model is evaluated for it, unless an evaluation had it. All have a loss.
        kept, keep_best = self._evaluations, self._training.keep_best
        if keep_best is None or kept.metric.name == "loss" or kept.best_round or kept.waited:
            return
        Evaluations((), keep_best, 0).add(0, as_floats(evaluate())[0])

    def add(self, round_number: int, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation; return whether to save its model as the best one so far."""
        training = self._training
        if training.keep_best is None and not training.stop_after:
            return False
        if jax.process_count() > 1:
            metrics = gather_json(dict(metrics))[0]
        self._evaluations.add(round_number, metrics)
        if training.keep_best is None or not self._saved.add(round_number, metrics):
            return False
        self._checkpoints.keep_best(round_number)
        return True

    def reason(self, done: int) -> str | None:
        """Return why the run stops after a round; None: it does not, or it has no more rounds."""
        return self._evaluations.reason if done < self._training.rounds else None

    def log(self, done: int, metrics: MetricsWriter, seconds: Mapping[str, float]) -> None:
        """Log that the run stops, and export its last model."""
        self._exports.end_at(done)
        if any((line["kind"], line["round"]) == (STOP, done) for line in self._kept):
            return  # by an earlier process
        evaluations = self._evaluations
        line = {"best_round": evaluations.best_round, "evaluations_since": evaluations.waited}
        metrics.write(STOP, done, {**line, **seconds})

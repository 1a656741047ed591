"""The settings of the training loop."""

import dataclasses
from collections.abc import Collection
from typing import Annotated, Literal, TypeAlias

from fedpax.checks import (
    CheckedConfig,
    Count,
    CountOrZero,
    IntRange,
    Positive,
    check_integer_fields,
)
from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.run_files.evaluations import parse_best_metric
from fedpax.run_files.paths import is_remote
from fedpax.training.diagnostics import OnHang, parse_profile_at
from fedpax.training.tracked_runs import TrackerName

OnSpike: TypeAlias = Literal["ignore", "skip", "roll_back"]


@dataclasses.dataclass(frozen=True)
class TrainingConfig(CheckedConfig):
    """The settings of the training loop.

    Attributes:
        rounds: number of rounds to train.
        evaluate_every: rounds between evaluations on held-out data; 0: only after the last round.
        checkpoint_every: rounds between checkpoints; 0: only after the last round. A run that is
            killed resumes from its last checkpoint.
        keep_checkpoints: number of checkpoints to keep, the newest ones. A run that rolls back also
            keeps the newest one of `checkpoint_every`.
        keep_every: rounds between checkpoints that are kept forever, beside the newest ones; these
            rounds are always saved. 0: keep none.
        export_every: rounds between exports of the model to `exports/ROUND` in the run's folder, as
            `fedpax export` writes it; these rounds, and the last one, are saved. 0: none.
        keep_best: a held-out metric, such as "loss" or "accuracy". The model of its best evaluation
            is kept: `load_params(folder, best=True)` and `--round=best` read it. Smaller values are
            better if the name ends with `loss`, otherwise larger ones; `min:NAME` and `max:NAME`
            state it. None: keep no best model.
        stop_after: number of evaluations in a row without improvement of `keep_best`, or of the
            loss, after which the run stops. 0: train all rounds.
        checkpoint_dir: the folder of the checkpoints, the exports and copies of the configuration
            and the metrics, such as `gs://BUCKET/FOLDER`. None: the run's folder.
        seed: seed of the initial parameters.
        begin_from: the folder of another run with the same model. The run begins from the model of
            its newest checkpoint. None: from new parameters.
        stop_on_non_finite: stop with an error when the loss or the state is NaN or infinite.
        on_spike: what to do when the loss of a round is not finite, or `spike_deviations` robust
            standard deviations above the median of the last `spike_window` rounds. "ignore": count
            it. "skip": discard the round's update, with memory for both states, each of which is
            tested too. "roll_back": return to the newest checkpoint before it and continue with the
            data after it.
        spike_window: number of losses that a loss is compared with; the round just before is not
            one of them. Until that number is reached, only a loss that is not finite is a spike.
        spike_deviations: deviations above the median; a deviation is 1.4826 times the median
            absolute deviation, at least 0.1% of the median.
        spike_limit: number of skipped rounds in a row, or of roll backs to one checkpoint, after
            which the next stops the run with an error.
        update_norm: add the norm of the change of the server's model to the metrics of each round.
            It can need memory for both models.
        profile_at: rounds to profile, `ROUND` or `ROUND:COUNT`, such as "50:3" for rounds 50, 51
            and 52. Default None: none.
        hang_after: seconds without progress in a round after which it hangs: the stacks of all
            threads are written to the folder (`fedpax.training.diagnostics`). None: do not watch.
        on_hang: "report" continues to wait after the report; "exit" ends the process with
            status 70, so that a supervisor can start it again.
        tracker: an experiment tracker that gets the configuration and the metrics too: "wandb"
            (Weights & Biases), "mlflow" or "trackio". None: none.
        track_checkpoints: send the newest checkpoint to the tracker as an artifact, whenever the
            former one is sent.

    Example:
        >>> TrainingConfig(rounds=100, evaluate_every=10, checkpoint_every=20).keep_checkpoints
        3
    """

    group = "training"
    rounds: Count
    evaluate_every: CountOrZero
    checkpoint_every: CountOrZero
    keep_checkpoints: Count = 3
    keep_every: CountOrZero = 0
    export_every: CountOrZero = 0
    keep_best: str | None = None
    stop_after: CountOrZero = 0
    checkpoint_dir: str | None = None
    seed: int = 0
    begin_from: str | None = None
    stop_on_non_finite: bool = True
    on_spike: OnSpike = "ignore"
    spike_window: Annotated[int, IntRange(least=2)] = 32
    spike_deviations: Positive = 6.0
    spike_limit: Count = 3
    update_norm: bool = False
    profile_at: str | None = None
    hang_after: Positive | None = 1800.0
    on_hang: OnHang = "report"
    tracker: TrackerName | None = None
    track_checkpoints: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_integer_fields(self, "training")
        super().__post_init__()
        if self.on_spike == "roll_back" and not (self.checkpoint_every or self.keep_every):
            raise ArgumentError(
                "training.on_spike='roll_back' has no checkpoint to return to with "
                "training.checkpoint_every=0, expected at least 1. Set --training.checkpoint_every "
                "to the number of rounds that a spike may cost."
            )
        if self.stop_after and not self.evaluate_every:
            raise ArgumentError(
                f"training.stop_after={self.stop_after} counts evaluations, but "
                "training.evaluate_every=0 has none before the last round. Set "
                "--training.evaluate_every to a number of rounds."
            )
        if self.track_checkpoints and self.tracker is None:
            raise ArgumentError(
                "training.track_checkpoints=True sends checkpoints to no tracker, expected one. "
                "Set --training.tracker=wandb, mlflow or trackio."
            )
        if self.track_checkpoints and is_remote(self.checkpoint_dir or ""):
            raise ArgumentError(
                f"training.track_checkpoints=True with training.checkpoint_dir="
                f"{self.checkpoint_dir}, expected checkpoints on this machine: those in a bucket "
                "are at hand already. Leave --training.track_checkpoints out."
            )
        if self.keep_best is not None:
            parse_best_metric(self.keep_best)
        if self.profile_at is not None:
            parse_profile_at(self.profile_at)

    def check_read(self, read: Collection[str], where: str, remedy: str = "Leave it out.") -> None:
        """Raise if a field has no effect on a kind of run, and not its default either."""
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if default is dataclasses.MISSING or field.name in ("seed", *read):
                continue
            if value in (default, ""):
                continue
            raise ConfigurationError(
                f"training.{field.name}={value!r} has no effect on {where}, expected {default!r}. "
                f"{remedy}"
            )


def is_due(round_number: int, rounds: int, *periods: int) -> bool:
    """Return whether to evaluate, or to save, after a round."""
    periods = tuple(period for period in periods if period > 0)
    return round_number == rounds or any(round_number % period == 0 for period in periods)


def last_due_before(round_number: int, *periods: int) -> int:
    """Return the last round before a given one that is a multiple of a period; 0 without."""
    before = range(round_number - 1, 0, -1)
    return next((number for number in before if is_due(number, 0, *periods)), 0)

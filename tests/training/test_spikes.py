import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_regression import RandomRounds, Regression

from fedpax.algorithms import fedavg
from fedpax.clients import Cohort
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training import trainer
from fedpax.training.experiment import Run
from fedpax.training.spikes import RepeatedSpikesError, Spike, SpikeHistory, spike_threshold
from fedpax.training.training_config import TrainingConfig

WINDOW = 4


def history(lines: Any = (), **changes: Any) -> SpikeHistory:
    settings = {"spike_window": WINDOW, "spike_limit": 2} | changes
    return SpikeHistory(
        lines, TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1, **settings)
    )


@given(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=20), st.floats(1.0, 9.0))
def test_the_threshold_is_some_robust_deviations_above_the_median(
    losses: list[float], deviations: float
) -> None:
    ordered = sorted(losses)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    distances = sorted(abs(loss - median) for loss in losses)
    mad = distances[middle] if len(ordered) % 2 else sum(distances[middle - 1 : middle + 1]) / 2
    expected = median + deviations * max(1.4826 * mad, 0.001 * median)
    assert spike_threshold(losses, deviations) == pytest.approx(expected)


def test_an_outlier_hardly_moves_the_threshold() -> None:
    losses = np.random.default_rng(0).normal(2.0, 0.1, 31).tolist()
    clean = spike_threshold(losses, 6.0)
    assert clean == pytest.approx(2.6, abs=0.2)
    assert abs(spike_threshold([*losses, 1e6], 6.0) - clean) < 0.1


def train(target: SpikeHistory, losses: list[float], first: int = 1) -> list[dict[str, Any]]:
    """Add rounds as the loop does, and return their lines of metrics.jsonl."""
    lines = []
    for number, loss in enumerate(losses, start=first):
        target.add(number, loss)
        logged = loss if math.isfinite(loss) else None
        counts = target.counts._asdict()
        lines.append({"kind": "training", "round": number, "loss": logged, **counts})
    return lines


random_losses = st.lists(
    st.one_of(st.floats(1.0, 2.0), st.sampled_from([50.0, math.nan, math.inf])), max_size=30
)


@given(losses=random_losses, cut=st.integers(0, 30), on_spike=st.sampled_from(["ignore", "skip"]))
def test_a_run_that_resumes_decides_as_one_that_was_not_interrupted(
    losses: list[float], cut: int, on_spike: str
) -> None:
    whole = history(on_spike=on_spike)
    lines = train(whole, losses)
    resumed = history(lines[:cut], on_spike=on_spike)
    assert train(resumed, losses[cut:], first=cut + 1) == lines[cut:]
    after = len(losses) + 1
    assert resumed.threshold(after) == whole.threshold(after)


def test_the_round_before_is_not_in_the_window() -> None:
    first, other = history(), history()
    train(first, [1.0, 1.1, 0.9, 1.2, 1.0])
    train(other, [1.0, 1.1, 0.9, 1.2, 9.0])
    assert first.threshold(6) == other.threshold(6) < math.inf
    assert first.threshold(7) != other.threshold(7)


def test_only_losses_that_are_not_finite_are_spikes_before_the_window_is_full() -> None:
    target = history()
    train(target, [1.0, 50.0, math.nan, 3.0, 1.0])
    assert target.counts == (1, 0, 1)


def test_a_lasting_change_of_the_loss_is_no_spike_forever() -> None:
    target = history()
    train(target, [1.0, 1.1, 0.9, 1.0, 1.0] + [5.0] * 10)
    assert 1 <= target.counts.spikes <= WINDOW


def test_skipped_losses_do_not_enter_the_window_and_too_many_in_a_row_raise() -> None:
    target = history(on_spike="skip")
    train(target, [1.0, 1.1, 0.9, 1.0, 1.0])
    threshold = target.threshold(6)
    for number in (6, 7):
        assert target.add(number, 50.0)
        target.check(number, 50.0, is_spike=True)
        assert target.threshold(number + 2) == threshold
    target.add(8, math.nan)
    assert target.counts == (3, 3, 1)
    with pytest.raises(RepeatedSpikesError, match=r"the last 3 rounds were skipped.*at most 2"):
        target.check(8, math.nan, is_spike=True)


def test_what_the_devices_found_counts() -> None:
    target = history(on_spike="skip")
    assert target.add(1, 1.0, recorded=True)
    assert not target.add(2, 1.0, recorded=False)
    assert target.counts == (1, 1, 0)


def test_roll_backs_leave_out_the_data_up_to_the_spike() -> None:
    target = history(on_spike="roll_back")
    lines = train(target, [1.0] * 4)
    for spike_round, left_out in ((6, 2), (5, 3)):
        target.add(spike_round, math.inf)
        with pytest.raises(Spike, match=f"the loss of round {spike_round} is inf") as caught:
            target.check(spike_round, math.inf, is_spike=True)
        record = target.roll_back(4, caught.value)
        assert (record["spike_round"], record["cohorts_left_out"]) == (spike_round, left_out)
        lines.append({"kind": "spike", "round": 4, **record, "loss": None})
        target = history(lines, on_spike="roll_back")
        assert target.cohorts_left_out(4) == left_out and target.cohorts_left_out(0) == 0
    assert target.counts == (2, 0, 2)
    with pytest.raises(RepeatedSpikesError, match="after 2 roll backs to round 4, expected"):
        target.roll_back(4, Spike(7, 9.0))
    target.roll_back(0, Spike(7, 9.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"on_spike": "stop"}, r"on_spike='stop': expected one of .*roll_back. Set --train"),
        ({"on_hang": "kill"}, r"on_hang='kill': expected one of report, exit. Set --train"),
        ({"spike_deviations": 0.0}, r"spike_deviations=0.0: expected a positive.*Set"),
        ({"hang_after": -1.0}, r"hang_after=-1.0: expected a positive.*Set"),
        ({"spike_window": 1}, r"spike_window=1: expected an int of at least 2. Set"),
        ({"spike_limit": 0}, r"spike_limit=0: expected an int of at least 1. Set"),
        ({"profile_at": "5:0"}, r"profile_at='5:0' is not a round.*profile_at=50:3"),
        ({"on_spike": "roll_back", "checkpoint_every": 0}, r"no checkpoint to return to.*Set"),
    ],
)
def test_settings_that_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingConfig(**{"rounds": 5, "evaluate_every": 0, "checkpoint_every": 1} | changes)


def test_a_logged_round_without_a_loss_is_no_loss_of_the_window() -> None:
    logged = [{"kind": "training", "round": r, "loss": 2.0, "spikes": 1} for r in (1, 2, 4, 5)]
    without = {"kind": "training", "round": 3}
    result = history([*logged[:2], without, *logged[2:]])
    assert result.threshold(7) == history(logged).threshold(7) < math.inf


class SomeEmpty(RandomRounds):
    """Rounds of two clients, of which the second and the fifth have none."""

    def __next__(self) -> Any:
        is_empty, batches = self.round in (1, 4), super().__next__()
        return Cohort(
            batches, np.ones(2, np.float32), client_ids=np.full(2, -1) if is_empty else np.arange(2)
        )

    @property
    def shapes(self) -> Any:
        ids, weights = jax.ShapeDtypeStruct((2,), "int32"), jax.ShapeDtypeStruct((2,), "float32")
        return Cohort(super().shapes, weights, client_ids=ids)


@dataclasses.dataclass(frozen=True)
class WithEmptyRounds(Regression):
    """FedAvg whose cohorts are `SomeEmpty`."""

    def build(self) -> Run:
        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), {}

        return (
            super()
            .build()
            ._replace(
                algorithm=fedavg(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.1)),
                init=lambda key: {"w": jnp.zeros(16)},
                cohorts=SomeEmpty((2, 2, 8), 16, seed=0),
                evaluate=lambda params: {"loss": 1.0},
                shardings=None,
            )
        )


@pytest.mark.parametrize("on_spike", ["ignore", "roll_back", "skip"])
def test_a_round_without_participants_has_no_loss_and_is_no_spike(
    tmp_path: Path, on_spike: Any
) -> None:
    training = TrainingConfig(
        rounds=6, on_spike=on_spike, spike_window=2, evaluate_every=6, checkpoint_every=6
    )
    trainer.train(WithEmptyRounds(training=training, mesh=MeshConfig()), tmp_path)
    lines = select(read_metrics(tmp_path), "training")
    assert [line["loss"] is None for line in lines] == [False, True, False, False, True, False]
    assert lines[-1]["spikes"] == lines[-1]["non_finite_rounds"] == 0
    assert not any("empty" in name for line in lines for name in line)

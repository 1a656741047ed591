"""Loss spikes: detection, skipping of rounds, and roll backs."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpax.algorithm import Metrics, Params, State, has_params_field
from fedpax.console import count_of
from fedpax.errors import FedpaxError
from fedpax.parallel.compiler_options import run_once_options
from fedpax.training.training_config import OnSpike, TrainingConfig

# A window of equal losses has no deviation: let it have at least this fraction of its median.
LEAST_RELATIVE_DEVIATION = 1e-3
# The standard deviation of a normal distribution over its median absolute deviation.
DEVIATION_PER_MAD = 1.4826


class RepeatedSpikesError(FedpaxError, ArithmeticError):
    """Skipping rounds or rolling back did not help; the message names the remedy."""

    exit_status = 1


class Spike(Exception):
    """A spike in a run that rolls back: its round and its loss."""

    def __init__(self, round_number: int, loss: float, what: str = "") -> None:
        super().__init__(what or f"the loss of round {round_number} is {loss}")
        self.round = round_number
        self.loss = loss


def spike_threshold(losses: Sequence[float], deviations: float) -> float:
    """Return the loss above which a round is a spike: median + k max(1.4826 MAD, 0.001 |median|).

    MAD is the median of the distances from the median: a few outliers change both little.
    """
    window = np.asarray(losses, np.float64)
    median = np.median(window)
    mad = np.median(np.abs(window - median))
    deviation = max(DEVIATION_PER_MAD * mad, LEAST_RELATIVE_DEVIATION * abs(median))
    return round(float(median + deviations * deviation), 12)


class SpikeCounts(NamedTuple):
    """Numbers of rounds since the start of a run, including rounds that a roll back discarded."""

    spikes: int = 0
    skipped_rounds: int = 0
    non_finite_rounds: int = 0  # rounds whose loss was NaN or infinite


class SpikeHistory:
    """The losses of a run, its spikes, and the data that its roll backs leave out."""

    # The window leaves out the round just before, whose loss may be unknown when the round is
    # dispatched: every process and every repetition must come to the same result.

    def __init__(self, lines: Iterable[Mapping[str, Any]], training: TrainingConfig) -> None:
        self.on_spike: OnSpike = training.on_spike
        self._window = training.spike_window
        self._deviations = training.spike_deviations
        self._limit = training.spike_limit
        self._losses: deque[tuple[int, float]] = deque(maxlen=self._window + 1)
        self._skipped_in_a_row = 0
        self._roll_backs: list[tuple[int, int]] = []  # (checkpoint's round, cohorts to leave out)
        self.counts = SpikeCounts()
        for line in lines:
            if line["kind"] in ("training", "spike"):
                before = self.counts
                self.counts = SpikeCounts(*(line.get(name) or 0 for name in SpikeCounts._fields))
                if line["kind"] == "spike":
                    self._roll_backs.append((line["round"], line.get("cohorts_left_out") or 0))
                else:
                    skipped = self.counts.skipped_rounds > before.skipped_rounds
                    self._add_loss(line["round"], line.get("loss"), skipped)

    def _add_loss(self, round_number: int, loss: float | None, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if loss is not None and math.isfinite(loss) and not skipped:
            self._losses.append((round_number, loss))

    def threshold(self, round_number: int) -> float:
        """Return the loss above which a round is a spike; infinity while the window is not full."""
        known = [loss for number, loss in self._losses if number < round_number - 1]
        if len(known) < self._window:
            return math.inf
        return spike_threshold(known[-self._window :], self._deviations)

    def add(self, round_number: int, loss: float, recorded: bool | None = None) -> bool:
        """Add a round; return whether it is a spike."""
        finite = math.isfinite(loss)
        is_spike = not finite or bool(loss > np.float32(self.threshold(round_number)))
        is_spike = is_spike if recorded is None else recorded
        skipped = is_spike and self.on_spike == "skip"
        spikes, skipped_rounds, non_finite_rounds = self.counts
        self.counts = SpikeCounts(
            spikes + is_spike, skipped_rounds + skipped, non_finite_rounds + (not finite)
        )
        self._add_loss(round_number, loss, skipped)
        return is_spike

    def check(self, round_number: int, loss: float, is_spike: bool) -> None:
        """Raise if the run cannot continue after a round that was added."""
        if is_spike and self.on_spike == "roll_back":
            raise Spike(round_number, loss)
        if self._skipped_in_a_row > self._limit:
            raise RepeatedSpikesError(
                f"the last {self._skipped_in_a_row} rounds were skipped, the last of them with a "
                f"loss of {loss}, expected at most {self._limit} in a row"
            )

    def spike_of_state(self, round_number: int, what: str) -> Spike:
        """Count and return a spike of a state that is not finite, where no loss has spiked."""
        self.counts = self.counts._replace(spikes=self.counts.spikes + 1)
        return Spike(round_number, math.nan, what)

    def roll_back(self, to: int, spike: Spike) -> dict[str, float]:
        """Return the line of `metrics.jsonl` that records a roll back."""
        count = sum(round_number == to for round_number, _ in self._roll_backs)
        if count >= self._limit:
            raise RepeatedSpikesError(
                f"{spike}, after {count_of(count, 'roll back')} to round {to}, expected at most "
                f"{self._limit}"
            )
        return {
            "loss": spike.loss,
            "spike_round": spike.round,
            "cohorts_left_out": self.cohorts_left_out(to) + spike.round - to,
            **self.counts._asdict(),
        }

    def cohorts_left_out(self, after: int) -> int:
        """Return the number of cohorts to leave out after a checkpoint's position in the data."""
        return max((left for number, left in self._roll_backs if number == after), default=0)


def skip_spikes(
    round: Callable[..., tuple[State, Metrics]],
) -> Callable[..., tuple[State, Metrics]]:
    """Make a round keep the former state if its loss spikes or its new state is not finite."""

    def guarded(
        state: State, threshold: Float[Array, ""], cohort: Any, *frozen: Any
    ) -> tuple[State, Metrics]:
        after, metrics = round(state, cohort, *frozen)
        loss = metrics["loss"].astype(jnp.float32)
        is_spike = ~jnp.isfinite(loss) | (loss > threshold) | turned_non_finite(state, after)
        after = jax.tree.map(lambda new, old: jnp.where(is_spike, old, new), after, state)
        return after, metrics | {"spikes": is_spike.astype(jnp.int32)}

    return guarded


def report_update_norm(
    round: Callable[..., tuple[State, Metrics]],
) -> Callable[..., tuple[State, Metrics]]:
    """Add `update_norm` to a round's metrics, if its state has the model as a field."""

    def reporting(state: State, cohort: Any, *frozen: Any) -> tuple[State, Metrics]:
        after, metrics = round(state, cohort, *frozen)
        if has_params_field(state):
            metrics = metrics | {"update_norm": update_norm(state.params, after.params)}
        return after, metrics

    return reporting


def update_norm(before: Params, after: Params) -> Float[Array, ""]:
    """Return the Euclidean norm of the change of all parameters, in float32."""
    squares = [
        jnp.sum(jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    return jnp.sqrt(jnp.sum(jnp.array(squares)))


def turned_non_finite(before: State, after: State) -> Bool[Array, ""]:
    """Return whether a number of a state was finite before a round and is not after it."""
    turned = [
        jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if _is_inexact(new)
    ]
    return jnp.any(jnp.array(turned, bool))


class FiniteCheck:
    """A check that the model, and leaves that were finite at the start, are finite."""

    def __init__(self, state: State) -> None:
        on_host = jax.default_backend() == "cpu" and jax.process_count() == 1
        self._finite_leaves: Callable[[State], Any] = (
            _finite_leaves_on_host
            if on_host and has_params_field(state)
            else jax.jit(_finite_leaves, compiler_options=run_once_options(jax.default_backend()))
        )
        self._at_start = self._finite_leaves(state)  # on the devices: nothing waits for it

    def find(self, state: State) -> str | None:
        """Return the path of the first leaf that must be finite and is not, or None."""
        finite, at_start = jax.device_get((self._finite_leaves(state), self._at_start))
        for path, is_finite in finite.items():
            if not is_finite and (at_start[path] or path.startswith(".params")):
                return path
        return None


def _real_leaves(state: State) -> dict[str, Array]:
    """Return by path the leaves of a real dtype, and the leaves of the model."""
    leaves = _by_path("", state)
    if not has_params_field(state):
        leaves |= _by_path(".params", state.params)
    return {path: leaf for path, leaf in leaves.items() if _is_inexact(leaf)}


def _finite_leaves(state: State) -> dict[str, Bool[Array, ""]]:
    """Return for each real leaf whether it is finite."""
    return {path: jnp.all(jnp.isfinite(x)) for path, x in _real_leaves(state).items()}


def _finite_leaves_on_host(state: State) -> dict[str, bool]:
    """Return the same for arrays in the host's memory, which need no program to be compiled."""
    return {path: _is_finite(leaf) for path, leaf in _real_leaves(state).items()}


def _is_finite(leaf: Array) -> bool:
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    arrays = [np.asarray(shard.data) for shard in shards if shard.replica_id == 0]
    pieces = (
        array[begin : begin + 2**20]
        for array in (array.reshape(-1) for array in arrays or [np.asarray(leaf)])
        for begin in range(0, array.size, 2**20)
    )
    return all(bool(np.isfinite(piece).all()) for piece in pieces)


def _by_path(prefix: str, tree: chex.ArrayTree) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)

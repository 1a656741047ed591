"""Goodput: the share of a cluster's chip time that trains, while chips fail independently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from fedpax.errors import ArgumentError

SECONDS_PER_YEAR = 365.25 * 24 * 3600


@dataclass(frozen=True)
class Cluster:
    """A cluster of slices, and how its chips fail. The assumptions of the simulation.

    Attributes:
        num_chips: number of chips.
        years_to_failure: mean years between two failures of a chip, exponential.
        chips_per_slice: number of chips that a failure takes out until the repair.
        repair_seconds: mean seconds between a failure and the slice's return, exponential.
        reshard_seconds: pause of a learner when it loses a slice: to notice it, repeat the step in
            progress, and reshard. A repaired slice rejoins without a pause.
        restart_seconds: pause of data parallelism with restart, until it has read the checkpoint.
            Failures during a pause are part of it.
        checkpoint_seconds: seconds between two checkpoints of data parallelism with restart.
            Writing takes no time from training.
        num_spares: number of slices that data parallelism with restart keeps idle, to replace
            failed ones. Default None: the mean number in repair and three standard deviations.

    Raises:
        ValueError: a number is out of range.
    """

    num_chips: int
    years_to_failure: float = 1.0
    chips_per_slice: int = 256
    repair_seconds: float = 6300.0
    reshard_seconds: float = 18.0
    restart_seconds: float = 63.0
    checkpoint_seconds: float = 1.0
    num_spares: int | None = None

    def __post_init__(self) -> None:
        if self.num_chips < self.chips_per_slice or self.chips_per_slice < 1:
            raise ArgumentError(
                f"num_chips is {self.num_chips} and chips_per_slice {self.chips_per_slice}, "
                "expected at least one chip per slice and one slice."
            )
        for name in ("years_to_failure", "repair_seconds", "checkpoint_seconds"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}, expected above 0.")
        for name in ("reshard_seconds", "restart_seconds"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}, expected at least 0.")
        if self.num_spares is None:
            failures = self.num_chips / (self.years_to_failure * SECONDS_PER_YEAR)
            mean = failures * self.repair_seconds
            spares = min(round(mean + 3 * mean**0.5), self.num_slices - 1)
            object.__setattr__(self, "num_spares", spares)
        elif not 0 <= self.num_spares < self.num_slices:
            raise ArgumentError(
                f"num_spares is {self.num_spares}, expected 0 to {self.num_slices - 1}: fewer than "
                "the slices."
            )

    @property
    def num_slices(self) -> int:
        """The number of whole slices."""
        return self.num_chips // self.chips_per_slice


class Failures(NamedTuple):
    """The failures of a cluster, in the order of time.

    Attributes:
        seconds: float64 `[failures]`, when a slice that was up lost a chip.
        slices: int64 `[failures]`, which slice.
        returns: float64 `[failures]`, when the slice is back.
        horizon: seconds simulated.
    """

    seconds: Float64[np.ndarray, " failures"]
    slices: Int64[np.ndarray, " failures"]
    returns: Float64[np.ndarray, " failures"]
    horizon: float


class Goodput(NamedTuple):
    """The result of a simulation.

    Attributes:
        goodput: share of the chip time that trained.
        uptime: share of the time in which some learner trained.
    """

    goodput: float
    uptime: float


def draw_failures(cluster: Cluster, horizon: float, seed: int) -> Failures:
    """Draw the failures of every chip of a cluster.

    Lifetimes of chips are exponential. A failure in a slice that is out for repair does not count.

    Example:
        >>> failures = draw_failures(Cluster(1_200_000), horizon=86_400.0, seed=0)
        >>> 2800 < len(failures.seconds) < 3300  # one per 26 seconds, fewer 5% in repair
        True
    """
    generator = np.random.default_rng(seed)
    chips = cluster.num_slices * cluster.chips_per_slice
    mean = chips * horizon / (cluster.years_to_failure * SECONDS_PER_YEAR)
    count = generator.poisson(mean)
    seconds = np.sort(generator.uniform(0.0, horizon, count))
    slices = generator.integers(0, chips, count) // cluster.chips_per_slice
    repaired = seconds + generator.exponential(cluster.repair_seconds, count)
    back: dict[int, float] = {}
    counts = np.zeros(count, bool)
    for k, (second, slice_, end) in enumerate(
        zip(seconds.tolist(), slices.tolist(), repaired.tolist(), strict=True)
    ):
        if back.get(slice_, 0.0) <= second:
            back[slice_] = end
            counts[k] = True
    return Failures(seconds[counts], slices[counts], repaired[counts], horizon)


def decoupled_goodput(cluster: Cluster, failures: Failures, num_learners: int) -> Goodput:
    """Simulate learners that train independently: Decoupled DiLoCo.

    Each learner has an equal part of the slices, and pauses alone when one of its chips fails. One
    learner is elastic data parallelism.

    Raises:
        ValueError: `num_learners` is below 1 or above the number of slices.

    Example:
        >>> cluster = Cluster(1_200_000)
        >>> failures = draw_failures(cluster, horizon=86_400.0, seed=0)
        >>> elastic, eight = (decoupled_goodput(cluster, failures, m).goodput for m in (1, 8))
        >>> 0.5 < elastic < 0.6 < 0.8 < eight < 0.9
        True
    """
    if not 1 <= num_learners <= cluster.num_slices:
        raise ArgumentError(
            f"num_learners is {num_learners}, expected 1 to {cluster.num_slices}, the number of "
            "slices."
        )
    learner_of = failures.slices * num_learners // cluster.num_slices
    sizes = np.bincount(
        np.arange(cluster.num_slices) * num_learners // cluster.num_slices, minlength=num_learners
    )
    useful, begins, ends = 0.0, [], []
    for learner in range(num_learners):
        of_learner = learner_of == learner
        begin, end = _pauses(
            failures.seconds[of_learner], cluster.reshard_seconds, failures.horizon
        )
        trained = _seconds_trained(begin, end)
        back = np.minimum(failures.returns[of_learner], failures.horizon)
        lost = trained(back) - trained(failures.seconds[of_learner])
        useful += sizes[learner] * float(trained(np.array([failures.horizon]))[0]) - lost.sum()
        begins.append(begin)
        ends.append(end)
    return Goodput(
        float(useful / (cluster.num_slices * failures.horizon)),
        1.0 - _seconds_all_paused(begins, ends) / failures.horizon,
    )


def restart_goodput(cluster: Cluster, failures: Failures) -> Goodput:
    """Simulate data parallelism of a fixed size that restarts from a checkpoint at each failure.

    A failed slice is replaced by a spare one; spare slices count as chip time that does not train.

    Example:
        >>> cluster = Cluster(1_200_000)
        >>> failures = draw_failures(cluster, horizon=86_400.0, seed=0)
        >>> 0.2 < restart_goodput(cluster, failures).goodput < 0.3
        True
    """
    spares = cluster.num_spares or 0
    active = cluster.num_slices - spares
    returned = np.sort(failures.returns)
    out = np.arange(1, len(returned) + 1) - np.searchsorted(returned, failures.seconds)
    # When so many are back that `active` slices are up, if no other one fails before.
    enough = returned[np.maximum(np.arange(len(returned)) - spares, 0)]
    # The spares are among the slices that are up; which ones is chance, drawn from the times.
    hits = np.random.default_rng(len(returned)).random(len(returned))
    is_active = hits * (cluster.num_slices - out + 1) < active
    trained, resumed = 0.0, 0.0
    for second, matters, number_out, later in zip(
        failures.seconds.tolist(), is_active.tolist(), out.tolist(), enough.tolist(), strict=True
    ):
        if number_out > spares:
            ready = max(later, second)
        elif second >= resumed and matters:
            ready = second
        else:
            continue
        if second > resumed:
            trained += (second - resumed) // cluster.checkpoint_seconds * cluster.checkpoint_seconds
        resumed = max(resumed, ready + cluster.restart_seconds)
    trained += max(failures.horizon - resumed, 0.0)
    uptime = trained / failures.horizon
    return Goodput(uptime * active / cluster.num_slices, uptime)


def _pauses(
    seconds: Float64[np.ndarray, " failures"], pause: float, horizon: float
) -> tuple[Float64[np.ndarray, " pauses"], Float64[np.ndarray, " pauses"]]:
    """Return begin and end of each pause: a failure outside of a pause begins one."""
    begin: list[float] = []
    until = -np.inf
    for second in seconds.tolist():
        if second >= until:
            begin.append(second)
            until = second + pause
    begins = np.array(begin)
    return begins, np.minimum(begins + pause, horizon)


def _seconds_trained(begin: np.ndarray, end: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from a time to the seconds trained by then."""
    paused = np.concatenate([[0.0], np.cumsum(end - begin)])

    def trained(second: np.ndarray) -> np.ndarray:
        past = np.searchsorted(begin, second, side="right")
        unfinished = np.where(past > 0, np.append(end, 0.0)[past - 1] - second, 0.0)
        return second - paused[past] + np.maximum(unfinished, 0.0)

    return trained


def _seconds_all_paused(begins: list[np.ndarray], ends: list[np.ndarray]) -> float:
    """Return the seconds in which every learner pauses."""
    times = np.concatenate([*begins, *ends])
    changes = np.concatenate([np.ones(sum(map(len, begins))), -np.ones(sum(map(len, ends)))])
    order = np.argsort(times, kind="stable")
    paused = np.cumsum(changes[order])[:-1]
    return float(np.sum(np.diff(times[order])[paused == len(begins)]))

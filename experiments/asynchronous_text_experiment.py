"""Text on islands that train at their own pace, simulated in virtual time."""

import abc
import dataclasses
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Float64, Int32

from fedpax import Cohort
from fedpax.experiments.text_experiment import TextExperiment
from fedpax.experiments.trace_settings import TraceConfig
from fedpax.training.experiment import Run
from fedpax.training.virtual_time import ScheduledRounds, TimedSchedule


class Order(Protocol):
    """The events of all rounds, as `fedpax.simulation` computes them."""

    @property
    def num_steps(self) -> Int32[np.ndarray, "rounds islands"]:
        """The steps of each island before it arrives."""
        ...

    @property
    def seconds(self) -> Float64[np.ndarray, "rounds ..."]:
        """When the events of a round happen; infinity where there is none."""
        ...

    @property
    def schedule(self) -> Any:
        """The schedules of all rounds, for `Cohort.schedule`: leaves `[rounds, islands]`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsynchronousText(TextExperiment):
    """Islands that train at their own pace, and arrive at a server as a trace says.

    A round is a sequence of arrivals in which no island arrives twice. The metric `virtual_seconds`
    is the simulated second of its last event. An island that does not arrive skips its batches of
    the round. The metrics `uploaded_bytes` and `broadcast_bytes` count the updates and the models
    of a round.

    Attributes:
        trace: the islands' speeds, networks and failures.
    """

    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    @abc.abstractmethod
    def order(self) -> Order:
        """Compute the order of all events of the run."""

    @staticmethod
    def ends(order: Order) -> Float[np.ndarray, " rounds"]:
        """Return when each round ends."""
        seconds = np.where(np.isfinite(order.seconds), order.seconds, 0.0)
        return seconds.reshape(len(seconds), -1).max(axis=1)

    def build(self) -> Run:
        """Make the run, and add the order of events to its cohorts."""
        run, order = super().build(), self.order()
        ends, schedules = self.ends(order).astype(np.float32), order.schedule

        def attach(cohort: Cohort, r: int) -> Cohort:
            schedule = jax.tree.map(lambda rounds: rounds[r], schedules)
            timed = TimedSchedule(schedule, np.full(self.islands, ends[r]))
            return cohort._replace(num_steps=order.num_steps[r], schedule=timed)

        by_island: Any = NamedSharding(
            run.mesh, PartitionSpec("islands" if "islands" in run.mesh.axis_names else None)
        )
        integers: Any = jax.ShapeDtypeStruct((self.islands,), np.int32)
        seconds: Any = jax.ShapeDtypeStruct((self.islands,), np.float32)
        timed = TimedSchedule(jax.tree.map(lambda rounds: integers, schedules), seconds)
        resolved = run.resolved_shardings
        shardings: Any = Cohort(resolved.cohort, num_steps=by_island, schedule=by_island)
        shapes = run.cohort_shapes
        assert isinstance(shapes, Cohort)
        # The islands that arrive, and their steps, differ from round to round.
        tokens = self.data.batch_size * self.data.seq_len
        return run._replace(
            cohorts=ScheduledRounds(run.cohorts, attach),
            shardings=resolved._replace(cohort=shardings),
            cohort_shapes=shapes._replace(num_steps=integers, schedule=timed),
            items_per_round=max(1, round(tokens * order.num_steps.sum() / len(order.num_steps))),
        )

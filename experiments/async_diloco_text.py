"""Asynchronous DiLoCo on text: islands of different speeds, simulated in virtual time."""

import abc
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from fedpax import Cohort
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import async_diloco
from fedpax.checks import Count, NonNegativeOrInfinite
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.experiments.diloco_text import OuterSGD, diloco_text, wire_codec
from fedpax.experiments.text_experiment import TextExperiment, text_fields
from fedpax.settings.function_settings import accepted, documented_by
from fedpax.settings.trace_settings import TraceConfig
from fedpax.simulation import (
    IslandArrivals,
    RegionalArrivals,
    dynamic_local_steps,
    island_arrivals,
)
from fedpax.training.exchanged_bytes import with_exchanged_bytes
from fedpax.training.experiment import Run
from fedpax.training.virtual_time import TimedSchedule, with_virtual_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsynchronousText(TextExperiment):
    """Islands that train at their own pace, and arrive at a server as a trace says.

    A round is a sequence of arrivals in which no island arrives twice. An island that does not
    arrive skips its batches of the round.

    Attributes:
        trace: the islands' speeds, networks and failures.
    """

    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    @abc.abstractmethod
    def order(self) -> IslandArrivals | RegionalArrivals:
        """Compute the order of all events of the run."""

    @staticmethod
    def ends(order: IslandArrivals | RegionalArrivals) -> Float[np.ndarray, " rounds"]:
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
        tokens = self.data.batch_size * self.data.seq_len
        return run._replace(
            cohorts=ScheduledRounds(run.cohorts, attach),
            shardings=resolved._replace(cohort=shardings),
            cohort_shapes=shapes._replace(num_steps=integers, schedule=timed),
            items_per_round=max(1, round(tokens * order.num_steps.sum() / len(order.num_steps))),
        )


@dataclasses.dataclass(frozen=True)
@documented_by(async_diloco)
class AsyncConfig(OuterSGD):
    """Asynchronous DiLoCo: its server, and when islands arrive.

    Attributes:
        dynamic_steps: slow islands take fewer steps, `data.local_steps` times their speed over the
            fastest one's. If False, all islands take `data.local_steps`.
        grace_seconds: seconds that the server waits for other islands after an arrival. inf: it
            waits for all of them, which is synchronous DiLoCo.
        compression: format of an update on the wire, with error feedback. "float32": no
            compression.
    """

    group = "asynchronous"
    period: Count | None = None
    dynamic_steps: bool = True
    grace_seconds: NonNegativeOrInfinite = 0.0
    compression: Literal["float32", "e3m0", "sign"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncDiLoCoText(AsynchronousText):
    """Islands that train at their own pace, and arrive at the server as a trace says.

    Attributes:
        asynchronous: the method's settings.
    """

    asynchronous: AsyncConfig = AsyncConfig()

    def order(self) -> IslandArrivals:
        """Compute the order of all arrivals of the run."""
        trace = self.trace.make(self.islands)
        settings, local_steps = self.asynchronous, self.data.local_steps
        order = island_arrivals(
            trace,
            num_rounds=self.training.rounds,
            num_steps=(
                dynamic_local_steps(trace, local_steps) if settings.dynamic_steps else local_steps
            ),
            grace_seconds=min(settings.grace_seconds, 1e30),
        )
        self.trace.check_horizon(self.ends(order)[-1])
        return order

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make asynchronous DiLoCo."""
        settings = self.asynchronous
        codec = wire_codec(settings.compression)
        algorithm = async_diloco(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            **accepted(async_diloco, vars(settings)),
            aggregator=None if codec is None else compressed_mean(codec, error_feedback=True),
        )
        return with_virtual_seconds(
            with_exchanged_bytes(
                algorithm,
                lambda schedule, metrics: (metrics["arrivals"], jnp.sum(schedule.position >= 0)),
                update_bytes=None if codec is None else functools.partial(_encoded_bytes, codec),
            )
        )


def _encoded_bytes(codec: codecs.Codec, params: Params) -> float:
    return codecs.wire_bits(codec, params) / 8


def async_diloco_text() -> AsyncDiLoCoText:
    """Asynchronous DiLoCo: 4 islands of different speeds, which fail and return, in virtual time.

    The model and the text are as in `diloco_text`. With the outer momentum of `diloco_text`, 0.7,
    the loss of this run rises in between.
    """
    return AsyncDiLoCoText(
        **text_fields(diloco_text()),
        asynchronous=AsyncConfig(learning_rate=0.7, momentum=0.3),
        trace=TraceConfig(sigma=0.7, seconds_to_failure=600.0, seconds_to_return=120.0),
    )


def waiting_diloco_text() -> AsyncDiLoCoText:
    """DiLoCo on the islands of async_diloco_text: each round waits for the slowest island."""
    settings = AsyncConfig(
        learning_rate=0.9, momentum=0.7, grace_seconds=float("inf"), dynamic_steps=False
    )
    return dataclasses.replace(async_diloco_text(), asynchronous=settings)

"""FedBuff on images: clients that report at their own pace, simulated in virtual time."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms import fedbuff
from fedpax.checks import CheckedConfig, Count, CountOrZero
from fedpax.clients import Arrivals
from fedpax.clients.cohort import CohortStream
from fedpax.console import count_of
from fedpax.data import ClientSampler, CohortRounds, Partition
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_images import FedAvgImages
from fedpax.experiments.parts.private_runs import configured_accountant, make_aggregator
from fedpax.models.classifiers import CNNConfig
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig, DirichletPopulation
from fedpax.settings.function_settings import documented_by
from fedpax.settings.trace_settings import TraceConfig
from fedpax.simulation import BufferedArrivals, buffered_arrivals
from fedpax.training.exchanged_bytes import with_exchanged_bytes
from fedpax.training.experiment import Run
from fedpax.training.training_config import TrainingConfig
from fedpax.training.virtual_time import TimedSchedule, with_virtual_seconds


@dataclasses.dataclass(frozen=True)
@documented_by(buffered_arrivals)
class BufferConfig(CheckedConfig):
    """FedBuff: how many clients train at a time, and how stale an update may be.

    Attributes:
        max_staleness: the server discards updates above it, and keeps `max_staleness + 1` versions
            of the model.
    """

    group = "buffer"
    concurrency: Count
    max_staleness: CountOrZero = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedBuffImages(FedAvgImages):
    """A convolutional network trained by FedBuff; a round is `cohort.size` arrivals.

    With `cohort.size=1` this is FedAsync.

    Attributes:
        buffer: the number of clients that train at a time, and the largest staleness.
        trace: the clients' speeds, networks and failures.
    """

    buffer: BufferConfig
    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohort.sampling_probability is not None:
            raise ArgumentError(
                f"cohort.sampling_probability={self.cohort.sampling_probability} has no effect: "
                "clients arrive when they have finished. Leave out --cohort.sampling_probability."
            )
        if self.method != method("fedavg"):
            raise ArgumentError(
                f"method={self.method} has no effect: these clients are trained by FedBuff. Leave "
                "the method at its default, or set it in an experiment of FedAvgImages."
            )
        if configured_accountant(self.aggregator) is not None:
            raise ArgumentError(
                f"aggregator={self.aggregator.function.__name__}: a client can arrive twice in a "
                "round of FedBuff, so that no epsilon holds. Set another --aggregator, such as "
                "clipped_mean, or train fedavg_digits."
            )

    def order(self, population: Partition) -> BufferedArrivals:
        """Compute the order of all arrivals of the run."""
        cohort = self.cohort
        sizes = np.array([len(population[k]) for k in range(len(population))])
        steps = cohort.local_epochs * -(-sizes // cohort.batch_size)
        if cohort.max_steps is not None:
            steps = np.minimum(steps, cohort.max_steps)
        if self.buffer.concurrency > len(population):
            raise ArgumentError(
                f"buffer.concurrency={self.buffer.concurrency}, but the population has "
                f"{count_of(len(population), 'client')}, expected at most all of them. Lower "
                "--buffer.concurrency."
            )
        order = buffered_arrivals(
            self.trace.make(len(population)),
            num_rounds=self.training.rounds,
            concurrency=self.buffer.concurrency,
            buffer_size=cohort.size,
            num_steps=np.maximum(steps, 1),
            max_staleness=self.buffer.max_staleness,
            seed=cohort.seed,
        )
        self.trace.check_horizon(order.seconds[-1, -1])
        return order

    def make_sampler(self, population: Partition) -> ClientSampler:
        """Make the sampler of the clients that arrive in each round."""
        order = self.order(population)
        return ArrivingClients(len(population), self.cohort.size, self.cohort.seed, order=order)

    def make_stream(self, rounds: CohortRounds, sampler: ClientSampler) -> CohortStream:
        """Add the schedule to each round, with equal weights as in the paper."""
        assert isinstance(sampler, ArrivingClients)
        order = sampler.order

        def attach(cohort: Cohort, r: int) -> Cohort:
            # The rows of a cohort are in another order than the arrivals.
            arrivals = np.argsort(order.client_ids[r], kind="stable")
            rows = np.argsort(np.asarray(cohort.client_ids), kind="stable")
            staleness = np.empty(self.cohort.size, np.int32)
            staleness[rows] = order.staleness[r, arrivals]
            end = np.full(self.cohort.size, order.seconds[r, -1], np.float32)
            schedule = TimedSchedule(Arrivals(staleness), end)
            return cohort._replace(num_examples=None, schedule=schedule)

        return ScheduledRounds(super().make_stream(rounds, sampler), attach)

    def build(self) -> Run:
        """Make the run, with the shapes of the schedules."""
        run = super().build()
        shapes = run.cohort_shapes
        assert isinstance(shapes, Cohort)
        size = (self.cohort.size,)
        integers: Any = jax.ShapeDtypeStruct(size, np.int32)
        seconds: Any = jax.ShapeDtypeStruct(size, np.float32)
        schedule = TimedSchedule(Arrivals(integers), seconds)
        return run._replace(cohort_shapes=shapes._replace(num_examples=None, schedule=schedule))

    def make_algorithm(self, loss_fn: LossFn, sampler: ClientSampler) -> FederatedAlgorithm:
        """Make FedBuff."""
        algorithm = fedbuff(
            loss_fn,
            buffer_size=self.cohort.size,
            max_staleness=self.buffer.max_staleness,
            client_optimizer=optax.sgd(self.client_learning_rate),
            server_optimizer=self.server.make(),
            chunk_size=self.cohort.at_once,
            aggregator=make_aggregator(self, sampler),
        )
        # Each client that arrives has received a model and sends an update.
        return with_virtual_seconds(
            with_exchanged_bytes(algorithm, lambda schedule, metrics: (self.cohort.size,) * 2)
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArrivingClients(ClientSampler):
    """Sample the clients that arrive in each round.

    Attributes:
        order: the arrivals of all rounds.
    """

    repeats = True

    order: BufferedArrivals

    def sample(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients that arrive in a round, int64 `[cohort]`; one can arrive twice."""
        return self.order.client_ids[round_number].astype(np.int64)


def fedbuff_digits() -> FedBuffImages:
    """FedBuff on the digits of fedavg_digits: 20 of 30 clients train at a time, in virtual time.

    The server updates its model at every 10th arrival. Takes seconds.
    """
    return FedBuffImages(
        dataset="digits",
        population=DirichletPopulation(num_clients=30, alpha=0.3),
        model=CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32),
        cohort=CohortConfig(size=10, batch_size=10, local_epochs=2),
        buffer=BufferConfig(concurrency=20),
        trace=TraceConfig(sigma=1.0, seconds_to_failure=600.0, seconds_to_return=60.0),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=60, evaluate_every=10, checkpoint_every=30),
    )

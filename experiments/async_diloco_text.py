"""Asynchronous DiLoCo on text: islands of different speeds, simulated in virtual time."""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
import optax

from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import async_diloco
from fedpax.checks import Count, NonNegativeOrInfinite
from fedpax.experiments.asynchronous_text_experiment import AsynchronousText
from fedpax.experiments.diloco_text import diloco_text
from fedpax.experiments.island_settings import OuterSGD, wire_codec
from fedpax.experiments.parts.settings import documented_by
from fedpax.experiments.text_experiment import text_fields
from fedpax.experiments.trace_settings import TraceConfig
from fedpax.simulation import IslandArrivals, dynamic_local_steps, island_arrivals
from fedpax.training.virtual_time import with_exchanged_bytes, with_virtual_seconds


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
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
            period=settings.period,
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

    The model and the text are as in `diloco_text`. The speeds are lognormal; slow islands take
    fewer steps. With the outer momentum of `diloco_text`, 0.7, the loss of this run rises in
    between. `--trace.file` reads measured speeds and failures.
    """
    return AsyncDiLoCoText(
        **text_fields(diloco_text()),
        asynchronous=AsyncConfig(learning_rate=0.7, momentum=0.3),
        trace=TraceConfig(sigma=0.7, seconds_to_failure=600.0, seconds_to_return=120.0),
    )


def waiting_diloco_text() -> AsyncDiLoCoText:
    """DiLoCo on the islands of async_diloco_text: each round waits for the slowest island.

    The outer learning rate and momentum are as in `diloco_text`.
    """
    settings = AsyncConfig(
        learning_rate=0.9, momentum=0.7, grace_seconds=float("inf"), dynamic_steps=False
    )
    return dataclasses.replace(async_diloco_text(), asynchronous=settings)

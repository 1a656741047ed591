"""HALoS on text: islands in regions with a slow network between them, in virtual time."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics
from fedpax.algorithms import DelayedNesterov, halos
from fedpax.checks import CheckedConfig, Count, Decay, Fraction, NonNegative, Positive
from fedpax.errors import ArgumentError
from fedpax.experiments.async_diloco_text import AsynchronousText, async_diloco_text
from fedpax.experiments.text_experiment import text_fields
from fedpax.settings.function_settings import arguments_of, documented_by
from fedpax.simulation import RegionalArrivals, dynamic_local_steps, regional_arrivals
from fedpax.training.exchanged_bytes import tree_bytes, with_exchanged_bytes
from fedpax.training.virtual_time import with_virtual_seconds


@dataclasses.dataclass(frozen=True)
@documented_by(halos, regional_arrivals)
class RegionsConfig(CheckedConfig):
    """HALoS: its regions, their servers, and the global server.

    Attributes:
        islands: number of islands of each region; their sum is `islands` of the experiment.
        seconds_to_global: seconds of a region's update on its way to the global server.
        seconds_from_global: seconds of the global model on its way to a region.
        local_learning_rate: learning rate of a region's server.
        local_momentum: Nesterov momentum of a region's server.
        local_period: updates of islands between two updates of this momentum. Default None: the
            number of islands of the largest region.
        global_learning_rate: learning rate of the global server.
        global_momentum: Nesterov momentum of the global server.
        global_period: updates of regions between two updates of this momentum. Default None: the
            number of regions.
    """

    group = "regions"
    islands: tuple[int, ...] = (2, 2)
    updates_per_exchange: Count = 4
    seconds_to_global: NonNegative = 5.0
    seconds_from_global: NonNegative = 5.0
    local_learning_rate: Positive = 0.7
    local_momentum: Decay = 0.3
    local_period: Count | None = None
    global_learning_rate: Positive = 1.0
    global_momentum: Decay = 0.0
    global_period: Count | None = None
    merge_weight: Fraction = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.islands or min(self.islands) < 1:
            raise ArgumentError(
                f"regions.islands={self.islands}: expected a positive number for each region. Set "
                "for example --regions.islands=2,2."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HALoSText(AsynchronousText):
    """Islands that arrive at the server of their region, and regions that exchange models.

    Attributes:
        regions: the method's settings.
    """

    regions: RegionsConfig = RegionsConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.regions.islands) != self.islands:
            raise ArgumentError(
                f"regions.islands={self.regions.islands} are {sum(self.regions.islands)} islands, "
                f"expected islands={self.islands}. Set --islands to their sum."
            )

    @property
    def region_of(self) -> tuple[int, ...]:
        """The region of each island."""
        return tuple(r for r, count in enumerate(self.regions.islands) for _ in range(count))

    def order(self) -> RegionalArrivals:
        """Compute the order of all events of the run."""
        trace, settings = self.trace.make(self.islands), self.regions
        order = regional_arrivals(
            trace,
            regions=self.region_of,
            num_rounds=self.training.rounds,
            num_steps=dynamic_local_steps(trace, self.data.local_steps),
            **arguments_of(regional_arrivals, settings),
        )
        self.trace.check_horizon(self.ends(order)[-1])
        return order

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make HALoS."""
        settings = self.regions
        algorithm = halos(
            loss_fn,
            regions=self.region_of,
            inner_optimizer=optimizer,
            local_server=DelayedNesterov(
                settings.local_learning_rate,
                settings.local_momentum,
                settings.local_period or max(settings.islands),
            ),
            global_server=DelayedNesterov(
                settings.global_learning_rate,
                settings.global_momentum,
                settings.global_period or len(settings.islands),
            ),
            merge_weight=settings.merge_weight,
        )
        return with_virtual_seconds(with_regional_bytes(algorithm))


def with_regional_bytes(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Report the bytes of a round of HALoS within regions, and between regions."""
    counted = with_exchanged_bytes(
        algorithm,
        lambda schedule, metrics: (metrics["arrivals"], jnp.sum(schedule.position >= 0)),
    )

    def round(state: Any, *arguments: Any) -> tuple[Any, Metrics]:
        after, metrics = counted.round(state, *arguments)
        both_ways = jnp.float32(2 * tree_bytes(state.params))
        return after, metrics | {"exchanged_bytes": both_ways * metrics["exchanges"]}

    return counted._replace(round=round)


def halos_text() -> HALoSText:
    """HALoS: the islands of async_diloco_text in two regions of two, in virtual time."""
    base = async_diloco_text()
    return HALoSText(**text_fields(base), trace=base.trace)

"""Compute utilization of training across sites, over the bandwidth between them.

A step computes a forward pass, then a backward pass of twice its length, layer by layer from the
last one. The (outer) gradient of a layer can be sent when its backward pass in the last step before
the exchange has ended. Transfers share one link and run one after another. Time in which nothing
computes because a transfer has not ended is *exposed*.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedpax.errors import ArgumentError

BACKWARD_FRACTION = 2 / 3
"""Part of a step's time that the backward pass takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteWorkload:
    """A model and its time per step, on one site."""

    num_params: float  # parameters that are exchanged, in layers of equal size
    num_layers: int
    step_seconds: float  # seconds of a step that communicates nothing

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (self.num_params > 0 and self.num_layers >= 1 and self.step_seconds > 0):
            raise ArgumentError(f"{self}: expected numbers above 0.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteExchange:
    """Content, period and overlap of the exchanges between sites."""

    period: int = 1  # H, steps between two exchanges of a layer; 1 is data parallelism
    fragments: int = 1  # groups of layers, evenly spaced over the period; strided
    bits: float = 16  # of a parameter on the link; 16: two sites exchange bfloat16
    overlap_steps: int = 0  # tau, steps after an exchange begins before its result is needed

    def __post_init__(self) -> None:
        """Check the ranges."""
        if min(self.period, self.fragments) < 1 or self.bits <= 0 or self.overlap_steps < 0:
            raise ArgumentError(
                f"{self}: expected period and fragments of at least 1, bits above 0, and "
                "overlap_steps of at least 0."
            )


def exposed_seconds(
    workload: SiteWorkload, exchange: SiteExchange, bits_per_second: float
) -> float:
    """Return the seconds of one period in which a site waits for transfers."""
    if not bits_per_second > 0:
        raise ArgumentError(f"bits_per_second is {bits_per_second}, expected a number above 0.")
    num_layers = workload.num_layers
    backward = workload.step_seconds * BACKWARD_FRACTION
    transfer = exchange.bits * workload.num_params / num_layers / bits_per_second
    hidden = exchange.overlap_steps * workload.step_seconds
    exposed = 0.0
    for fragment in range(min(exchange.fragments, num_layers)):
        end = -np.inf  # from the end of the step
        for layer in reversed(range(fragment, num_layers, exchange.fragments)):
            end = max(end, -backward * layer / num_layers) + transfer
        exposed += max(0.0, end - hidden)
    return exposed


def compute_utilization(
    workload: SiteWorkload, exchange: SiteExchange, bits_per_second: float
) -> float:
    """Return the part of the time in which a site computes, from 0 to 1."""
    computing = exchange.period * workload.step_seconds
    return computing / (computing + exposed_seconds(workload, exchange, bits_per_second))


def required_bandwidth(
    workload: SiteWorkload, exchange: SiteExchange, utilization: float, grid: Sequence[float]
) -> float:
    """Return the smallest bandwidth of a grid that reaches a utilization; infinity: none does."""
    if not 0 < utilization <= 1:
        raise ArgumentError(f"utilization is {utilization}, expected above 0 and at most 1.")
    reached = (b for b in sorted(grid) if compute_utilization(workload, exchange, b) >= utilization)
    return next(reached, float("inf"))

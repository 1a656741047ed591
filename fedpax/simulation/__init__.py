"""Simulation: time as data. Traces of a population, and the order of events that follows."""

from fedpax.simulation.buffered_arrivals import BufferedArrivals, buffered_arrivals
from fedpax.simulation.chip_failures import (
    Cluster,
    Failures,
    Goodput,
    decoupled_goodput,
    draw_failures,
    restart_goodput,
)
from fedpax.simulation.distributions import (
    Distribution,
    constant,
    exponential,
    lognormal,
    transfer_seconds,
    uniform,
)
from fedpax.simulation.island_arrivals import (
    FragmentSyncs,
    IslandArrivals,
    dynamic_local_steps,
    fragment_syncs,
    island_arrivals,
)
from fedpax.simulation.regional_arrivals import RegionalArrivals, regional_arrivals
from fedpax.simulation.trace import Trace, draw_trace, load_trace, save_trace

__all__ = [
    "BufferedArrivals",
    "Cluster",
    "Distribution",
    "Failures",
    "FragmentSyncs",
    "Goodput",
    "IslandArrivals",
    "RegionalArrivals",
    "Trace",
    "buffered_arrivals",
    "constant",
    "decoupled_goodput",
    "draw_failures",
    "draw_trace",
    "dynamic_local_steps",
    "exponential",
    "fragment_syncs",
    "island_arrivals",
    "load_trace",
    "lognormal",
    "regional_arrivals",
    "restart_goodput",
    "save_trace",
    "transfer_seconds",
    "uniform",
]

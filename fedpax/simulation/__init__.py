"""Simulation: time as data. Traces of a population, and the order of events that follows."""

from fedpax.simulation.buffered_arrivals import BufferedArrivals, buffered_arrivals
from fedpax.simulation.distributions import (
    Distribution,
    constant,
    exponential,
    lognormal,
    transfer_seconds,
    uniform,
)
from fedpax.simulation.trace import Trace, draw_trace
from fedpax.simulation.trace_files import load_trace, save_trace

__all__ = [
    "BufferedArrivals",
    "Distribution",
    "Trace",
    "buffered_arrivals",
    "constant",
    "draw_trace",
    "exponential",
    "load_trace",
    "lognormal",
    "save_trace",
    "transfer_seconds",
    "uniform",
]

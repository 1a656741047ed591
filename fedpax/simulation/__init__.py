"""Simulation: time as data. Traces of a population, and the order of events that follows."""

from fedpax.lazy_names import public_names as _public_names
from fedpax.simulation.buffered_arrivals import BufferedArrivals as BufferedArrivals
from fedpax.simulation.buffered_arrivals import buffered_arrivals as buffered_arrivals
from fedpax.simulation.chip_failures import Cluster as Cluster
from fedpax.simulation.chip_failures import Failures as Failures
from fedpax.simulation.chip_failures import Goodput as Goodput
from fedpax.simulation.chip_failures import decoupled_goodput as decoupled_goodput
from fedpax.simulation.chip_failures import draw_failures as draw_failures
from fedpax.simulation.chip_failures import restart_goodput as restart_goodput
from fedpax.simulation.distributions import Distribution as Distribution
from fedpax.simulation.distributions import constant as constant
from fedpax.simulation.distributions import exponential as exponential
from fedpax.simulation.distributions import lognormal as lognormal
from fedpax.simulation.distributions import transfer_seconds as transfer_seconds
from fedpax.simulation.distributions import uniform as uniform
from fedpax.simulation.island_arrivals import FragmentSyncs as FragmentSyncs
from fedpax.simulation.island_arrivals import IslandArrivals as IslandArrivals
from fedpax.simulation.island_arrivals import dynamic_local_steps as dynamic_local_steps
from fedpax.simulation.island_arrivals import fragment_syncs as fragment_syncs
from fedpax.simulation.island_arrivals import island_arrivals as island_arrivals
from fedpax.simulation.regional_arrivals import RegionalArrivals as RegionalArrivals
from fedpax.simulation.regional_arrivals import regional_arrivals as regional_arrivals
from fedpax.simulation.trace import Trace as Trace
from fedpax.simulation.trace import draw_trace as draw_trace
from fedpax.simulation.trace import load_trace as load_trace
from fedpax.simulation.trace import save_trace as save_trace

__all__ = _public_names(globals())

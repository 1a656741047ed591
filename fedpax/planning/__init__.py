"""Ahead-of-time plans: chips, topologies, interconnect, the compiled plan and its reports."""

from fedpax.chips import CHIPS as CHIPS
from fedpax.chips import Chip as Chip
from fedpax.chips import chip_of as chip_of
from fedpax.lazy_names import public_names as _public_names
from fedpax.planning.ahead_of_time import MemoryOverflowError as MemoryOverflowError
from fedpax.planning.ahead_of_time import PlanError as PlanError
from fedpax.planning.ahead_of_time import plan_experiment as plan_experiment
from fedpax.planning.compiled_plan import CompiledPlan as CompiledPlan
from fedpax.planning.json_report import to_json as to_json
from fedpax.planning.overlap import SiteExchange as SiteExchange
from fedpax.planning.overlap import SiteWorkload as SiteWorkload
from fedpax.planning.overlap import compute_utilization as compute_utilization
from fedpax.planning.overlap import find_overlap as find_overlap
from fedpax.planning.overlap import required_bandwidth as required_bandwidth
from fedpax.planning.text_report import to_text as to_text
from fedpax.planning.topology import Topology as Topology
from fedpax.planning.topology import TopologyError as TopologyError
from fedpax.planning.topology import find_topology as find_topology

__all__ = _public_names(globals())

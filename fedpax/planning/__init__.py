"""Ahead-of-time plans: chips, topologies, interconnect, the compiled plan and its reports."""

from fedpax.chips import CHIPS, Chip, chip_of
from fedpax.planning.ahead_of_time import MemoryOverflowError, PlanError, plan_experiment
from fedpax.planning.compiled_plan import CompiledPlan
from fedpax.planning.json_report import to_json
from fedpax.planning.overlap import (
    SiteExchange,
    SiteWorkload,
    compute_utilization,
    find_overlap,
    required_bandwidth,
)
from fedpax.planning.text_report import to_text
from fedpax.planning.topology import Topology, TopologyError, find_topology

__all__ = [
    "CHIPS",
    "Chip",
    "CompiledPlan",
    "MemoryOverflowError",
    "PlanError",
    "SiteExchange",
    "SiteWorkload",
    "Topology",
    "TopologyError",
    "chip_of",
    "compute_utilization",
    "find_overlap",
    "find_topology",
    "plan_experiment",
    "required_bandwidth",
    "to_json",
    "to_text",
]

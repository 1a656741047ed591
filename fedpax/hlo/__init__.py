"""Readers of compiled text (HLO): parsing, trip counts, replica groups, collectives, costs."""

from fedpax.hlo.collectives import Collective, collectives, operand_bytes_along
from fedpax.hlo.costs import ProgramCosts, count_costs
from fedpax.hlo.parsing import Computation, Instruction, Module, parse
from fedpax.hlo.transfer_schedule import Completion, Start, Work

__all__ = [
    "Collective",
    "Completion",
    "Computation",
    "Instruction",
    "Module",
    "ProgramCosts",
    "Start",
    "Work",
    "collectives",
    "count_costs",
    "operand_bytes_along",
    "parse",
]

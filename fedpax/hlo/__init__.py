"""Readers of compiled text (HLO): parsing, trip counts, replica groups, collectives, costs."""

from fedpax.hlo.collectives import Collective as Collective
from fedpax.hlo.collectives import collectives as collectives
from fedpax.hlo.collectives import operand_bytes_along as operand_bytes_along
from fedpax.hlo.costs import ProgramCosts as ProgramCosts
from fedpax.hlo.costs import count_costs as count_costs
from fedpax.hlo.parsing import Computation as Computation
from fedpax.hlo.parsing import Instruction as Instruction
from fedpax.hlo.parsing import Module as Module
from fedpax.hlo.parsing import parse as parse
from fedpax.hlo.transfer_schedule import Completion as Completion
from fedpax.hlo.transfer_schedule import Start as Start
from fedpax.hlo.transfer_schedule import Work as Work
from fedpax.lazy_names import public_names as _public_names

__all__ = _public_names(globals())

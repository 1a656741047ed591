"""Reports on a program: its loops and stored values, its cost, what it sends."""

from fedpax.inspect.cost import Cost, cost
from fedpax.inspect.explain import explain

__all__ = ["Cost", "cost", "explain"]

"""Ahead-of-time plans: chips, topologies, interconnect, the compiled plan and its report."""

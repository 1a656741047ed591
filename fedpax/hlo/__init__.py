"""Readers of compiled text: computations, trip counts, replica groups, collectives, costs."""

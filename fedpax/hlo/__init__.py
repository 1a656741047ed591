"""Readers of compiled text (HLO): parsing, trip counts, replica groups, collectives, costs."""

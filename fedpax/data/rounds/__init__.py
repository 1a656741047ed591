"""Rounds: endless streams of one `fedpax.Cohort` of NumPy arrays per round, and held-out data."""

"""Rounds: endless streams of one `fedpax.Cohort` of NumPy arrays per round, and held-out data.

`get_state` returns a stream's position as JSON values and `set_state` restores it, so that a
resumed run sees the batches of an uninterrupted one.
"""

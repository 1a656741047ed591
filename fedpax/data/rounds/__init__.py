"""Checkpointable streams of rounds of batches."""

"""Populations: partitions, generated clients, and samplers of each round's clients."""

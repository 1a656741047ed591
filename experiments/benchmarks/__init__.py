"""Benchmarks: each prints a table and writes its measurements as JSON."""

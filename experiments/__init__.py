"""Experiments: zero-argument functions, each returns a configuration that can be trained."""

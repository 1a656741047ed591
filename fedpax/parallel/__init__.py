"""Meshes, model axes, and what a compiled program sends over them."""

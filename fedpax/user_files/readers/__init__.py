"""Readers: a module for each format, which reads a file as an Arrow table with a kept library."""

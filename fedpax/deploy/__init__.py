"""Engines that run the stages of a program."""

from fedpax.deploy.local import run_local

__all__ = ["run_local"]

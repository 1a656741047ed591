"""Engines that run the stages of a program, and their export to files."""

from fedpax.deploy.artifacts import export_stages, pack_stages
from fedpax.deploy.batch_work import Clients, EachClient
from fedpax.deploy.inspection import inspect_round
from fedpax.deploy.local import run_local
from fedpax.deploy.runtime import Artifact, ArtifactError, load

__all__ = [
    "Artifact",
    "ArtifactError",
    "Clients",
    "EachClient",
    "export_stages",
    "inspect_round",
    "load",
    "pack_stages",
    "run_local",
]

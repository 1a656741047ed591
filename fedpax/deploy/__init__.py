"""Engines that run the stages of a program, and their export to files."""

import importlib

_MODULES = {
    "Artifact": "fedpax.deploy.runtime",
    "ArtifactError": "fedpax.deploy.runtime",
    "Clients": "fedpax.deploy.batch_work",
    "EachClient": "fedpax.deploy.batch_work",
    "Node": "fedpax.deploy.node",
    "Settings": "fedpax.deploy.round_program",
    "compile_client": "fedpax.deploy.iree_compiler",
    "export_stages": "fedpax.deploy.artifacts",
    "inspect_round": "fedpax.deploy.inspection",
    "load": "fedpax.deploy.runtime",
    "pack_program": "fedpax.deploy.round_program",
    "pack_stages": "fedpax.deploy.artifacts",
    "run_local": "fedpax.deploy.local",
    "run_out_of_core": "fedpax.deploy.host_memory",
    "write_app": "fedpax.deploy.flower_files",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name on first use: a process that forwards messages needs no JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedpax.deploy' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

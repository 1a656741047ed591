"""Engines that run the stages of a program, and their export to files."""

from fedpax.lazy_names import lazy_names

# On first use: a process that forwards messages needs no JAX.
_MODULES = {
    "Artifact": "fedpax.deploy.runtime",
    "ArtifactError": "fedpax.deploy.runtime",
    "Clients": "fedpax.deploy.batch_work",
    "EachClient": "fedpax.deploy.batch_work",
    "Node": "fedpax.deploy.nodes.node",
    "Settings": "fedpax.deploy.round_program",
    "compile_client": "fedpax.deploy.iree_compiler",
    "export_stages": "fedpax.deploy.artifacts",
    "inspect_round": "fedpax.deploy.artifacts",
    "load": "fedpax.deploy.runtime",
    "pack_program": "fedpax.deploy.round_program",
    "pack_stages": "fedpax.deploy.artifacts",
    "run_beam": "fedpax.deploy.beam",
    "run_local": "fedpax.deploy.local_stages",
    "run_out_of_core": "fedpax.deploy.local_stages",
    "write_app": "fedpax.deploy.flower.app_files",
}
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_names(__name__, _MODULES)

"""Engines that run the stages of a program, and their export to files."""

from fedpax.lazy_names import lazy_names

# On first use: a process that forwards messages needs no JAX.
_NAMES = {
    "fedpax.deploy.artifacts": "export_stages inspect_round pack_stages",
    "fedpax.deploy.batch_work": "Clients EachClient",
    "fedpax.deploy.beam": "run_beam",
    "fedpax.deploy.flower.app_files": "write_app",
    "fedpax.deploy.iree_compiler": "compile_client",
    "fedpax.deploy.local_stages": "run_local run_out_of_core",
    "fedpax.deploy.nodes.node": "Node",
    "fedpax.deploy.round_program": "Settings pack_program",
    "fedpax.deploy.runtime": "Artifact ArtifactError load",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)

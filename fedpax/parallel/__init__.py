"""Parallelism: meshes, logical axes, pipelines, rings and simulated devices."""

from fedpax.parallel.axes import RULES, constrain, explicit_spec, partition_spec, shardings
from fedpax.parallel.compiler_options import overlap_options, simulate_devices
from fedpax.parallel.mesh import MeshConfig, available_devices, default_devices, make_mesh
from fedpax.parallel.mesh_rule import ShardedSize, follow
from fedpax.parallel.pipeline import run_pipeline

__all__ = [
    "RULES",
    "MeshConfig",
    "ShardedSize",
    "available_devices",
    "constrain",
    "default_devices",
    "explicit_spec",
    "follow",
    "make_mesh",
    "overlap_options",
    "partition_spec",
    "run_pipeline",
    "shardings",
    "simulate_devices",
]

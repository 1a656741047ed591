"""Parallelism: meshes, logical axes, pipelines, rings and simulated devices."""

from fedpax.lazy_names import public_names as _public_names
from fedpax.parallel.axes import RULES as RULES
from fedpax.parallel.axes import constrain as constrain
from fedpax.parallel.axes import explicit_spec as explicit_spec
from fedpax.parallel.axes import partition_spec as partition_spec
from fedpax.parallel.axes import shardings as shardings
from fedpax.parallel.compiler_options import overlap_options as overlap_options
from fedpax.parallel.compiler_options import simulate_devices as simulate_devices
from fedpax.parallel.mesh import MeshConfig as MeshConfig
from fedpax.parallel.mesh import available_devices as available_devices
from fedpax.parallel.mesh import default_devices as default_devices
from fedpax.parallel.mesh import make_mesh as make_mesh
from fedpax.parallel.mesh_sizes import ShardedSize as ShardedSize
from fedpax.parallel.mesh_sizes import follow as follow
from fedpax.parallel.pipeline import run_pipeline as run_pipeline

__all__ = _public_names(globals())

"""The public names of engines, for type checkers and `fedpax.lazy_names`."""

from fedpax.deploy.artifacts import export_stages as export_stages
from fedpax.deploy.artifacts import inspect_round as inspect_round
from fedpax.deploy.artifacts import pack_stages as pack_stages
from fedpax.deploy.batch_work import Clients as Clients
from fedpax.deploy.batch_work import EachClient as EachClient
from fedpax.deploy.beam import run_beam as run_beam
from fedpax.deploy.flower.app_files import write_app as write_app
from fedpax.deploy.iree_compiler import compile_client as compile_client
from fedpax.deploy.local_stages import run_local as run_local
from fedpax.deploy.local_stages import run_out_of_core as run_out_of_core
from fedpax.deploy.nodes.node import Node as Node
from fedpax.deploy.round_program import Settings as Settings
from fedpax.deploy.round_program import pack_program as pack_program
from fedpax.deploy.runtime import Artifact as Artifact
from fedpax.deploy.runtime import ArtifactError as ArtifactError
from fedpax.deploy.runtime import load as load

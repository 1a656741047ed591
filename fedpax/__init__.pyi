"""The public names of fedpax for type checkers; `__init__.py` imports them on first use."""

from fedpax import aggregators as aggregators
from fedpax import algorithms as algorithms
from fedpax import checkpoints as checkpoints
from fedpax import clients as clients
from fedpax import commands as commands
from fedpax import data as data
from fedpax import deploy as deploy
from fedpax import elastic as elastic
from fedpax import experiments as experiments
from fedpax import hlo as hlo
from fedpax import inspect as inspect
from fedpax import models as models
from fedpax import ops as ops
from fedpax import parallel as parallel
from fedpax import planning as planning
from fedpax import populations as populations
from fedpax import primitives as primitives
from fedpax import processes as processes
from fedpax import reports as reports
from fedpax import run_files as run_files
from fedpax import secure_sums as secure_sums
from fedpax import simulation as simulation
from fedpax import sites as sites
from fedpax import sources as sources
from fedpax import text as text
from fedpax import training as training
from fedpax import transforms as transforms
from fedpax import user_files as user_files
from fedpax.algorithm import FederatedAlgorithm as FederatedAlgorithm
from fedpax.clients.cohort import Cohort as Cohort
from fedpax.commands.train_in_python import train as train
from fedpax.errors import FedpaxError as FedpaxError
from fedpax.inspect import cost as cost
from fedpax.inspect import explain as explain
from fedpax.parallel.mesh import make_mesh as make_mesh
from fedpax.primitives import federated_broadcast as federated_broadcast
from fedpax.primitives import federated_map as federated_map
from fedpax.primitives import federated_max as federated_max
from fedpax.primitives import federated_mean as federated_mean
from fedpax.primitives import federated_min as federated_min
from fedpax.primitives import federated_sum as federated_sum
from fedpax.transforms import out_of_core as out_of_core
from fedpax.transforms import program as program
from fedpax.transforms import stages as stages

__version__: str

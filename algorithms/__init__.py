"""Federated and multi-island methods, one file each, named as their papers name them."""

from fedpax.algorithms.data_parallel import data_parallel
from fedpax.algorithms.diloco import diloco
from fedpax.algorithms.fedavg import fedavg
from fedpax.algorithms.fedopt import server_adagrad, server_adam, server_yogi
from fedpax.algorithms.local_steps import local_steps, participant_weights, valid_steps

__all__ = [
    "data_parallel",
    "diloco",
    "fedavg",
    "local_steps",
    "participant_weights",
    "server_adagrad",
    "server_adam",
    "server_yogi",
    "valid_steps",
]

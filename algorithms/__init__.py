"""Federated and multi-island methods, one file each, named as their papers name them."""

from fedpax.algorithms.agnostic import agnostic
from fedpax.algorithms.apfl import apfl, apfl_models
from fedpax.algorithms.async_diloco import async_diloco
from fedpax.algorithms.branch_train_merge import (
    branch_train_merge,
    cached_prior,
    ensemble_log_likelihood,
)
from fedpax.algorithms.data_parallel import data_parallel
from fedpax.algorithms.decoupled_diloco import decoupled_diloco
from fedpax.algorithms.diloco import diloco
from fedpax.algorithms.ditto import ditto
from fedpax.algorithms.eager_diloco import eager_diloco
from fedpax.algorithms.easgd import easgd
from fedpax.algorithms.fedac import FedAcRates, fedac, fedac_i, fedac_ii
from fedpax.algorithms.fedasync import fedasync
from fedpax.algorithms.fedavg import fedavg
from fedpax.algorithms.fedbuff import fedbuff
from fedpax.algorithms.feddyn import feddyn
from fedpax.algorithms.fednova import fednova
from fedpax.algorithms.fedopt import server_adagrad, server_adam, server_yogi
from fedpax.algorithms.fedprox import fedprox
from fedpax.algorithms.fine_tuning import fine_tuning_evaluation
from fedpax.algorithms.halos import halos
from fedpax.algorithms.hypcluster import choose_cluster, hypcluster
from fedpax.algorithms.local_sgd import local_sgd
from fedpax.algorithms.maml import per_fedavg, reptile
from fedpax.algorithms.mime import mime, mime_adam, mime_lite
from fedpax.algorithms.muloco import muloco
from fedpax.algorithms.noloco import noloco
from fedpax.algorithms.papa import papa, papa_2, papa_all
from fedpax.algorithms.parts.arrivals import DelayedNesterov, hinge_staleness, polynomial_staleness
from fedpax.algorithms.parts.decoupled_parts import decoupled_diloco_parts, directional_mean
from fedpax.algorithms.parts.fragments import layer_fragments
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.model_averaging import greedy_soup, merge
from fedpax.algorithms.parts.participation import participant_weights, valid_steps
from fedpax.algorithms.scaffold import scaffold
from fedpax.algorithms.self_tuning import self_tuning
from fedpax.algorithms.sparseloco import sparseloco
from fedpax.algorithms.streaming_diloco import streaming_diloco
from fedpax.primitives.user_functions import explain_unknown_arguments

__all__ = [
    "DelayedNesterov",
    "FedAcRates",
    "agnostic",
    "apfl",
    "apfl_models",
    "async_diloco",
    "branch_train_merge",
    "cached_prior",
    "choose_cluster",
    "data_parallel",
    "decoupled_diloco",
    "decoupled_diloco_parts",
    "diloco",
    "directional_mean",
    "ditto",
    "eager_diloco",
    "easgd",
    "ensemble_log_likelihood",
    "fedac",
    "fedac_i",
    "fedac_ii",
    "fedasync",
    "fedavg",
    "fedbuff",
    "feddyn",
    "fednova",
    "fedprox",
    "fine_tuning_evaluation",
    "greedy_soup",
    "halos",
    "hinge_staleness",
    "hypcluster",
    "layer_fragments",
    "local_sgd",
    "local_steps",
    "merge",
    "mime",
    "mime_adam",
    "mime_lite",
    "muloco",
    "noloco",
    "papa",
    "papa_2",
    "papa_all",
    "participant_weights",
    "per_fedavg",
    "polynomial_staleness",
    "reptile",
    "scaffold",
    "self_tuning",
    "server_adagrad",
    "server_adam",
    "server_yogi",
    "sparseloco",
    "streaming_diloco",
    "valid_steps",
]

explain_unknown_arguments(__all__, globals())

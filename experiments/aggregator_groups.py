"""Groups of experiments: the aggregators, each with FedAvg on the same problem."""

import dataclasses
from collections.abc import Mapping

from fedpax.experiments.catalog import ExperimentGroup
from fedpax.experiments.client_aggregators import AggregatorConfig, aggregator
from fedpax.experiments.fedavg_clients import ClientExperiment
from fedpax.experiments.method_groups import methods_digits

AGGREGATORS: Mapping[str, AggregatorConfig] = {
    "mean": aggregator("mean"),
    "clipped_mean": aggregator("clipped_mean", quantile=0.5),
    "private_mean": aggregator("private_mean", noise_multiplier=0.3),
    "secure_mean": aggregator("secure_mean", max_value=0.5),
    "private_secure_mean": aggregator("private_secure_mean", noise_multiplier=0.3),
    "quantized_mean": aggregator("quantized_mean"),
    "uniform": aggregator("compressed_mean"),
    "rotated_uniform": aggregator("compressed_mean", rotated=True),
    "drive": aggregator("compressed_mean", codec="drive"),
    "terngrad": aggregator("compressed_mean", codec="terngrad"),
    "sign": aggregator("compressed_mean", codec="sign", error_feedback=True),
    "e3m0": aggregator("compressed_mean", codec="e3m0", error_feedback=True),
    "top_k": aggregator("compressed_mean", codec="top_k", error_feedback=True),
    "random_k": aggregator("compressed_mean", codec="random_k", error_feedback=True),
    "coordinate_median": aggregator("coordinate_median"),
    "trimmed_mean": aggregator("trimmed_mean"),
    "krum": aggregator("krum"),
    "multi_krum": aggregator("krum", num_selected=5),
    "bulyan": aggregator("bulyan"),
    "geometric_median": aggregator("geometric_median"),
}
"""The aggregators by name."""


def aggregators_digits() -> ExperimentGroup:
    """FedAvg with each aggregator on digits, the problem of methods_digits."""
    group = methods_digits()
    base = group.experiments["fedavg"]
    assert isinstance(base, ClientExperiment)
    experiments = {
        name: dataclasses.replace(base, aggregator=aggregator)
        for name, aggregator in AGGREGATORS.items()
    }
    return group._replace(experiments=experiments)

"""Groups of experiments: the aggregators, each with FedAvg on the same problem."""

import dataclasses
from collections.abc import Mapping

from fedpax.experiments.catalog import ExperimentGroup
from fedpax.experiments.client_aggregators import (
    AggregatorConfig,
    ClippedMean,
    CompressedMean,
    Mean,
    PrivateMean,
    PrivateSecureMean,
    QuantizedMean,
    SecureMean,
)
from fedpax.experiments.fedavg_clients import ClientExperiment
from fedpax.experiments.methods import methods_digits
from fedpax.experiments.robust_aggregators import (
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    TrimmedMean,
)

AGGREGATORS: Mapping[str, AggregatorConfig] = {
    "mean": Mean(),
    "clipped_mean": ClippedMean(quantile=0.5),
    "private_mean": PrivateMean(noise_multiplier=0.3),
    "secure_mean": SecureMean(max_value=0.5),
    "private_secure_mean": PrivateSecureMean(noise_multiplier=0.3),
    "quantized_mean": QuantizedMean(),
    "uniform": CompressedMean(),
    "rotated_uniform": CompressedMean(rotated=True),
    "drive": CompressedMean(codec="drive"),
    "terngrad": CompressedMean(codec="terngrad"),
    "sign": CompressedMean(codec="sign", error_feedback=True),
    "e3m0": CompressedMean(codec="e3m0", error_feedback=True),
    "top_k": CompressedMean(codec="top_k", error_feedback=True),
    "random_k": CompressedMean(codec="random_k", error_feedback=True),
    "coordinate_median": CoordinateMedian(),
    "trimmed_mean": TrimmedMean(),
    "krum": Krum(),
    "multi_krum": Krum(num_selected=5),
    "bulyan": Bulyan(),
    "geometric_median": GeometricMedian(),
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

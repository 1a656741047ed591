"""Aggregators: combine the participants' updates into one."""

from fedpax.aggregators.aggregator import Aggregator, AggregatorTransformation, chain, mean
from fedpax.aggregators.clipping import adaptive_clip, clip_by_norm
from fedpax.aggregators.compressed_mean import compressed_mean
from fedpax.aggregators.coordinate_means import coordinate_median, trimmed_mean
from fedpax.aggregators.gaussian_noise import add_local_noise, add_noise
from fedpax.aggregators.geometric_median import geometric_median
from fedpax.aggregators.krum import bulyan, krum
from fedpax.aggregators.privacy_accounting import (
    PrivacyAccountant,
    noise_multiplier_for,
    privacy_spent,
)
from fedpax.aggregators.private_mean import private_mean
from fedpax.aggregators.private_secure_mean import private_secure_mean
from fedpax.aggregators.quantized_mean import choose_packing, quantized_mean
from fedpax.aggregators.random_numbers import random_stream
from fedpax.aggregators.secure_mean import FixedPoint, secure_mean
from fedpax.aggregators.sent_values import mark_sent
from fedpax.primitives.user_functions import explain_unknown_arguments

__all__ = [
    "Aggregator",
    "AggregatorTransformation",
    "FixedPoint",
    "PrivacyAccountant",
    "adaptive_clip",
    "add_local_noise",
    "add_noise",
    "bulyan",
    "chain",
    "choose_packing",
    "clip_by_norm",
    "compressed_mean",
    "coordinate_median",
    "geometric_median",
    "krum",
    "mark_sent",
    "mean",
    "noise_multiplier_for",
    "privacy_spent",
    "private_mean",
    "private_secure_mean",
    "quantized_mean",
    "random_stream",
    "secure_mean",
    "trimmed_mean",
]

explain_unknown_arguments(__all__, globals())

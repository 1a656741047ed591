"""Aggregators: combine the participants' updates into one."""

from fedpax.aggregators.aggregator import Aggregator, mean
from fedpax.aggregators.quantized_mean import quantized_mean

__all__ = ["Aggregator", "mean", "quantized_mean"]

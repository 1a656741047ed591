"""Aggregators: combine the participants' updates into one."""

from fedpax.aggregators.aggregator import Aggregator, mean
from fedpax.aggregators.chain import AggregatorTransformation, chain
from fedpax.aggregators.quantized_mean import quantized_mean
from fedpax.aggregators.sent import mark_sent

__all__ = [
    "Aggregator",
    "AggregatorTransformation",
    "chain",
    "mark_sent",
    "mean",
    "quantized_mean",
]

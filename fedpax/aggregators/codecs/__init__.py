"""Codecs: send an update in few bits. `fedpax.aggregators.compressed_mean` uses them."""

from fedpax.aggregators.codecs.blocks import wire_bits
from fedpax.aggregators.codecs.codec import Codec, float32
from fedpax.aggregators.codecs.device_exchange import Exchange, choose_exchange
from fedpax.aggregators.codecs.rotated import rotated
from fedpax.aggregators.codecs.scalar_quantization import e3m0, terngrad, uniform
from fedpax.aggregators.codecs.sign import drive, sign
from fedpax.aggregators.codecs.sparsification import random_k, top_k
from fedpax.primitives.user_functions import explain_unknown_arguments

__all__ = [
    "Codec",
    "Exchange",
    "choose_exchange",
    "drive",
    "e3m0",
    "float32",
    "random_k",
    "rotated",
    "sign",
    "terngrad",
    "top_k",
    "uniform",
    "wire_bits",
]

explain_unknown_arguments(__all__, globals())

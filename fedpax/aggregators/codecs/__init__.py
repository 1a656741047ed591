"""Codecs: send an update in few bits. `fedpax.aggregators.compressed_mean` uses them."""

from fedpax.aggregators.codecs.blocks import wire_bits as wire_bits
from fedpax.aggregators.codecs.codec import Codec as Codec
from fedpax.aggregators.codecs.codec import float32 as float32
from fedpax.aggregators.codecs.device_exchange import Exchange as Exchange
from fedpax.aggregators.codecs.device_exchange import choose_exchange as choose_exchange
from fedpax.aggregators.codecs.rotated import rotated as rotated
from fedpax.aggregators.codecs.scalar_quantization import e3m0 as e3m0
from fedpax.aggregators.codecs.scalar_quantization import terngrad as terngrad
from fedpax.aggregators.codecs.scalar_quantization import uniform as uniform
from fedpax.aggregators.codecs.sign import drive as drive
from fedpax.aggregators.codecs.sign import sign as sign
from fedpax.aggregators.codecs.sparsification import random_k as random_k
from fedpax.aggregators.codecs.sparsification import top_k as top_k
from fedpax.primitives.user_functions import explained_names as _explained_names

__all__ = _explained_names(globals())

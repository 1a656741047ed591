"""Aggregators: combine the participants' updates into one."""

from fedpax.aggregators.aggregator import Aggregator as Aggregator
from fedpax.aggregators.aggregator import AggregatorTransformation as AggregatorTransformation
from fedpax.aggregators.aggregator import chain as chain
from fedpax.aggregators.aggregator import mean as mean
from fedpax.aggregators.clipping import adaptive_clip as adaptive_clip
from fedpax.aggregators.clipping import clip_by_norm as clip_by_norm
from fedpax.aggregators.compressed_mean import compressed_mean as compressed_mean
from fedpax.aggregators.coordinate_means import coordinate_median as coordinate_median
from fedpax.aggregators.coordinate_means import trimmed_mean as trimmed_mean
from fedpax.aggregators.gaussian_noise import add_local_noise as add_local_noise
from fedpax.aggregators.gaussian_noise import add_noise as add_noise
from fedpax.aggregators.geometric_median import geometric_median as geometric_median
from fedpax.aggregators.krum import bulyan as bulyan
from fedpax.aggregators.krum import krum as krum
from fedpax.aggregators.privacy_accounting import PrivacyAccountant as PrivacyAccountant
from fedpax.aggregators.privacy_accounting import noise_multiplier_for as noise_multiplier_for
from fedpax.aggregators.privacy_accounting import privacy_spent as privacy_spent
from fedpax.aggregators.private_mean import private_mean as private_mean
from fedpax.aggregators.private_secure_mean import private_secure_mean as private_secure_mean
from fedpax.aggregators.quantized_mean import choose_packing as choose_packing
from fedpax.aggregators.quantized_mean import quantized_mean as quantized_mean
from fedpax.aggregators.random_numbers import random_stream as random_stream
from fedpax.aggregators.secure_mean import FixedPoint as FixedPoint
from fedpax.aggregators.secure_mean import secure_mean as secure_mean
from fedpax.aggregators.sent_values import mark_sent as mark_sent
from fedpax.primitives.user_functions import explained_names as _explained_names

__all__ = _explained_names(globals())

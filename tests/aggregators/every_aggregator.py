"""All aggregators and transformations, for tests of what holds for each of them."""

from fedpax.aggregators import (
    adaptive_clip,
    add_local_noise,
    add_noise,
    bulyan,
    chain,
    clip_by_norm,
    codecs,
    compressed_mean,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
    trimmed_mean,
)

N = 8
AGGREGATORS = {
    "mean": mean(),
    "clip_by_norm": chain(clip_by_norm(1.5), mean()),
    "adaptive_clip": chain(adaptive_clip(initial_norm=1.5, count_stddev=0.5), mean()),
    "add_noise": chain(add_noise(0.1, seed=0), mean()),
    "add_local_noise": chain(add_local_noise(0.1, seed=0), mean()),
    "private_mean": private_mean(
        max_norm=1.5, noise_multiplier=0.1, seed=0, quantile=0.5, count_stddev=1.0
    ),
    "private_secure_mean": private_secure_mean(
        max_norm=1.5, noise_multiplier=0.1, seed=0, min_participants=4, num_neighbors=2
    ),
    "secure_mean": secure_mean(max_value=2.0, num_neighbors=2),
    "quantized_mean": quantized_mean(4),
    "compressed_mean": compressed_mean(codecs.sign(), error_feedback=True),
    "compressed_mean unbiased": compressed_mean(codecs.rotated(codecs.uniform(2))),
    "coordinate_median": coordinate_median(),
    "trimmed_mean": trimmed_mean(0.2),
    "krum": krum(1),
    "krum selected": krum(1, num_selected=3),
    "bulyan": bulyan(1),
    "geometric_median": geometric_median(),
}

"""The outer model of a syncer."""

import jax.numpy as jnp
import numpy as np
import optax

from fedpax.aggregators import add_noise, chain, mean
from fedpax.algorithms.parts.decoupled_parts import decoupled_diloco_parts
from fedpax.sites.syncer.outer_model import OuterModel


def test_fragments_of_one_shape_have_noise_of_their_own():
    parts = decoupled_diloco_parts(
        lambda params, batch: (jnp.sum(params["a"]), {}),
        islands=2,
        inner_optimizer=optax.sgd(0.1),
        steps_per_sync=1,
        outer_optimizer=optax.sgd(1.0),
        fragments=lambda path, leaf: ["a", "b"].index(path),
        aggregator=chain(add_noise(1.0, seed=0), mean()),
    )
    outer = OuterModel(parts, {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
    merged = []
    for p in range(2):
        state = outer.fragments[p]
        (name,) = (k for k, leaf in state.params.items() if leaf is not None)
        gradient = {k: None if k != name else np.zeros(3, np.float32) for k in "ab"}
        new, _ = outer.merge(p, [(0, gradient, 1.0), (1, gradient, 1.0)])
        merged.append(np.asarray(new.params[name]))
    assert np.all(merged[0] != 0) and not np.any(np.isclose(*merged))

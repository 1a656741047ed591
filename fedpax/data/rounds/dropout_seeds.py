"""Seeds for dropout: a random number for each example of a round's cohort."""

import jax
import numpy as np

from fedpax.clients.cohort import Cohort

DROPOUT_SEED = "dropout_seed"
"""The field of a batch with the seeds of its examples."""


def add_dropout_seeds(cohort: Cohort, round_number: int, *, seed: int) -> Cohort:
    """Add a field `dropout_seed` to the batches: a random number for each example and step.

    The numbers depend on the seed, the round and the client alone, so that a run can resume on
    other devices.

    Args:
        cohort: the cohort; `batches` is a dict of arrays `[clients, steps, batch, ...]`, and
            `client_ids` are set.
        round_number: the round, from 0.
        seed: the random seed.

    Returns:
        The cohort with `batches["dropout_seed"]`, uint32 `[clients, steps, batch]`.

    Example:
        >>> cohort = Cohort({"label": np.zeros((2, 3, 4), int)}, client_ids=np.array([7, 1]))
        >>> seeds = add_dropout_seeds(cohort, 0, seed=0).batches["dropout_seed"]
        >>> seeds.shape, seeds.dtype.name
        ((2, 3, 4), 'uint32')
    """
    shape = jax.tree.leaves(cohort.batches)[0].shape[1:3]
    seeds = [
        # -1: an absent client. The constant 1 keeps this stream apart from the augmentation's.
        np.random.default_rng([seed, round_number, int(client) + 1, 1]).integers(
            2**32, size=shape, dtype=np.uint32
        )
        for client in np.asarray(cohort.client_ids)
    ]
    return cohort._replace(batches={**cohort.batches, DROPOUT_SEED: np.stack(seeds)})

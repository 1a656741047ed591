"""A population of clients whose examples identify themselves."""

import numpy as np


def problem(sizes, seed=0):
    """Make examples that identify themselves, and clients of given sizes."""
    total = sum(sizes)
    order = np.random.default_rng(seed).permutation(total)
    examples = {
        "image": np.broadcast_to(np.arange(total)[:, None], (total, 2)).astype(np.float32),
        "label": np.arange(total),
    }
    return examples, np.split(order, np.cumsum(sizes)[:-1])


def keep_fields(fields):
    return dict(fields)

"""Whether a program is traced for stages, whose server waits for participants."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# The cache of `jax.jit` depends on a user context: a function is traced again for stages.
_for_stages = jax.make_user_context(False)


@contextmanager
def trace_for_stages() -> Iterator[None]:
    """Trace programs with noise of the participants, and without simulated masks."""
    with _for_stages(True):
        yield


def is_for_stages() -> bool:
    """Return whether a program is traced for stages, whose engine masks the sums."""
    return bool(_for_stages.value)

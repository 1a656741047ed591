"""The primitive of a program. Its rules are in `fedpax.transforms.program`, above the passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from fedpax.primitives._jax import Primitive

federated_program_p = Primitive("federated_program")
"""The primitive of a call of `fedpax.program`'s result."""
federated_program_p.multiple_results = True


# Whether a program is traced for stages, whose server waits for participants.
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

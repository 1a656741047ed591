"""The parts of a multi-island method, for islands with runtimes of their own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import optax
from jaxtyping import Array, Float

from fedpax.aggregators import Aggregator
from fedpax.aggregators.codecs import Codec


class FragmentLike(Protocol):
    """A part of the parameters, such as a `fedpax.algorithms.fragments.Fragment`."""

    def take(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the part of a pytree, with None for leaves outside of the part."""
        ...

    def put(self, tree: chex.ArrayTree, part: chex.ArrayTree) -> chex.ArrayTree:
        """Replace the part in a pytree."""
        ...


class Report(Protocol):
    """The averaged metrics of inner steps, and the number of these steps."""

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """Scalars by name, with `"loss"`."""
        ...

    @property
    def num_steps(self) -> Float[Array, ""]:
        """The number of steps."""
        ...


class AlgorithmParts(NamedTuple):
    """A multi-island method in parts: the inner steps of one island, and the merge at a syncer.

    `FederatedAlgorithm` runs all islands as one program. Islands with runtimes of their own
    (`fedpax.sites`) need the parts: each island takes the same inner steps on its own devices, and
    a syncer merges one fragment of the model after another.

    A round has P merges, one per fragment. After every `steps_per_sync` inner steps, an island
    sends the fragment that is merged next. When `quorum` islands have sent it, the syncer waits at
    most `grace_seconds` for the other islands that are up, and merges it. An update that arrives
    later is part of the next merge of its fragment.

    Attributes:
        islands: number of shards of the data, and the largest number of islands.
        init_inner: `params -> inner_state` of one island.
        inner_steps: `(params, inner_state, batches, num_steps) -> (params, inner_state, report)`
            of one island; leaves of `batches` are `[steps, batch, ...]`. In a run with frozen
            values (`with_frozen_argument`), these values are one more argument.
        make_fragments: `params -> fragments`; only the parameters' structure and shapes are read.
        outer_optimizer: steps each fragment of the outer model, with one state per fragment.
        aggregator: merges the islands' outer gradients of a fragment, weighted by tokens^2 / steps.
        steps_per_sync: S, inner steps between two updates of an island.
        codec: the format of an update on the wire. Default None: float32.
        error_feedback: whether an island adds the codec's error to its next update of the same
            fragment. Default False.
        quorum: K, number of islands that must send a fragment before it is merged. Default 1.
        grace_seconds: the most seconds that the syncer waits after the quorum. Default 0.0.
        max_steps_ahead: the most inner steps that an island takes after the last merge that it has
            received; then it waits. At least S. With S, islands wait for each merge, as in one
            program without delay. Default None: 32 S.
        max_staleness: an update is dropped if its fragment was merged more often than this since
            the island took the update's first step. Default 4.
        max_norm: an update with a larger L2 norm is dropped. Default None: any norm up to 1e18.
    """

    islands: int
    init_inner: Callable[[chex.ArrayTree], optax.OptState]
    inner_steps: Callable[..., tuple[Any, optax.OptState, Report]]
    make_fragments: Callable[[chex.ArrayTree], Sequence[FragmentLike]]
    outer_optimizer: optax.GradientTransformation
    aggregator: Aggregator
    steps_per_sync: int
    codec: Codec | None = None
    error_feedback: bool = False
    quorum: int = 1
    grace_seconds: float = 0.0
    max_steps_ahead: int | None = None
    max_staleness: int = 4
    max_norm: float | None = None


def most_phases_ahead(parts: AlgorithmParts) -> int:
    """Return the most phases of S steps that an island takes after its last received merge.

    Args:
        parts: the method.

    Returns:
        `max_steps_ahead / S`, rounded down; 32 if `max_steps_ahead` is None.
    """
    if parts.max_steps_ahead is None:
        return 32
    return parts.max_steps_ahead // parts.steps_per_sync

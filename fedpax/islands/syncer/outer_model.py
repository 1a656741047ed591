"""The outer model of a syncer: its parameters and optimizer, merged fragment by fragment."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax.aggregators import random_stream
from fedpax.aggregators.sent_values import several_releases
from fedpax.algorithm import AlgorithmParts, Params
from fedpax.algorithms.parts.frozen_leaves import keep_leaves, without_leaves
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.errors import ConfigurationError
from fedpax.islands.fragment_format import FragmentFormat
from fedpax.primitives.placement import trace_for_stages
from fedpax.training.round_logger import NonFiniteError
from fedpax.transforms.inlining import inline
from fedpax.transforms.marks import least_masked, noise_as_arguments
from fedpax.transforms.program import program
from fedpax.transforms.stage_noise import normal


class FragmentState(NamedTuple):
    """The state of one fragment. Arrays are replaced, never written to."""

    params: Params  # the outer parameters of the fragment, float32 in the host's memory
    outer_optimizer_state: optax.OptState  # the state of the outer optimizer for these parameters
    aggregator_state: chex.ArrayTree  # the state of the aggregator for these parameters
    version: int  # number of merges of the fragment


class Contribution(NamedTuple):
    """The contribution of one island to a merge."""

    shard: int
    gradient: Params  # the outer gradient of a fragment
    weight: float


class OuterModel:
    """The outer parameters in float32, divided into fragments that are merged one at a time."""

    def __init__(self, parts: AlgorithmParts, params: Params) -> None:
        self._parts = parts
        self._split = parts.make_fragments(params)
        self._like = params
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        taken = [fragment.take(params) for fragment in self._split]
        self.formats = [FragmentFormat(parts, part) for part in taken]
        self.decode = [jax.jit(form.decode) for form in self.formats]
        frozen = [getattr(fragment, "frozen", ()) for fragment in self._split]
        merges = {flags: jax.jit(self._make_merge(flags)) for flags in set(frozen)}
        starts = {flags: jax.jit(self._make_init(flags)) for flags in set(frozen)}
        self.fragments = [
            self._on_host(part, *starts[flags](part), version=0)
            for part, flags in zip(taken, frozen, strict=True)
        ]
        self._merges = [
            self._with_own_noise(p, flags) or merges[flags] for p, flags in enumerate(frozen)
        ]

    def _with_own_noise(self, p: int, frozen: Sequence[bool]) -> Any:
        """Return a merge with the system's noise: islands could subtract noise of the seed."""
        islands, state = self._parts.islands, self.fragments[p][:3]
        stacked = jax.tree.map(lambda x: np.zeros((islands, *x.shape), x.dtype), state[0])
        arguments = (*state, stacked, np.zeros(islands, np.float32))
        with trace_for_stages(), self._stream(p):  # which keeps the marks of noise and masks
            closed, result = jax.make_jaxpr(self._make_merge(frozen), return_shape=True)(*arguments)
        if least_masked(closed.jaxpr) is not None:
            raise ConfigurationError(
                "the aggregator is secure_mean or private_secure_mean, whose terms must be masked, "
                "and the syncer of Decoupled DiLoCo sees each island's update, expected another "
                "aggregator, such as private_mean, whose noise the syncer adds. Or train in rounds "
                "over sites, with --secure_sums."
            )
        inlined = inline(closed, inside=lambda inner: inner)
        closed, of_server, of_islands = noise_as_arguments(inlined)
        if not of_server and not of_islands:
            return None
        stddevs = [*(noise.stddev for noise in of_server), *of_islands]
        shapes = [aval.shape for aval in closed.in_avals[-len(stddevs) :]]
        compiled = jax.jit(functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts))

        def merge(*arguments: Any) -> Any:
            drawn = [normal(s, shape) for s, shape in zip(stddevs, shapes, strict=True)]
            leaves = compiled(*jax.tree.leaves(arguments), *drawn)
            return jax.tree.unflatten(jax.tree.structure(result), leaves)

        return merge

    @contextmanager
    def _stream(self, p: int) -> Iterator[None]:
        """Draw random numbers of fragment p, and count its releases, as in decoupled_diloco."""
        with random_stream(p), several_releases(len(self._split)):
            yield

    def params(self, fragments: Sequence[FragmentState] | None = None) -> Params:
        """Return the whole model in the initial dtypes, by default of the current states."""
        whole = self._like
        states = self.fragments if fragments is None else fragments
        for fragment, state in zip(self._split, states, strict=True):
            part = jax.tree.map(
                lambda x, like: jnp.asarray(x, like.dtype), state.params, fragment.take(whole)
            )
            whole = fragment.put(whole, part)
        return whole

    def merge(
        self, p: int, contributions: Sequence[Contribution]
    ) -> tuple[FragmentState, Mapping[str, float]]:
        """Merge outer gradients into fragment p; return its new state and the metrics."""
        # The model does not change until `put`.
        state = self.fragments[p]
        rows: list[Any] = [None] * self._parts.islands
        weights = np.zeros(self._parts.islands, np.float32)
        for shard, gradient, weight in contributions:
            rows[shard], weights[shard] = gradient, weight
        zeros = jax.tree.map(np.zeros_like, state.params)
        stacked = jax.tree.map(
            lambda *leaves: np.stack(leaves), *[zeros if row is None else row for row in rows]
        )
        with self._stream(p):
            *new, metrics = self._merges[p](*state[:3], stacked, weights)
        # It would count an island once for each merge; it is part of fewer.
        values = {name: float(value) for name, value in metrics.items() if name != "epsilon"}
        return self._on_host(*new, version=state.version + 1), values

    def put(self, p: int, state: FragmentState) -> None:
        """Replace the state of a fragment."""
        self.fragments[p] = state

    def _make_merge(self, frozen: Sequence[bool]) -> Any:
        parts = self._parts
        aggregator = without_leaves(parts.aggregator, frozen)

        @program(islands=parts.islands)
        def merge(
            x: Params,
            outer_state: optax.OptState,
            aggregator_state: chex.ArrayTree,
            gradients: Params,
            weights: jax.Array,
        ) -> tuple[Params, optax.OptState, chex.ArrayTree, dict[str, jax.Array]]:
            delta, aggregator_state, metrics = aggregator.aggregate(
                aggregator_state, gradients, weights
            )
            stepped, outer_state = optimizer_step(parts.outer_optimizer, delta, outer_state, x)
            x = keep_leaves(frozen, stepped, x)
            return x, outer_state, aggregator_state, metrics

        return merge

    def _make_init(self, frozen: Sequence[bool]) -> Any:
        parts = self._parts
        aggregator = without_leaves(parts.aggregator, frozen)

        @program(islands=parts.islands)
        def init(part: Params) -> tuple[optax.OptState, chex.ArrayTree]:
            return parts.outer_optimizer.init(part), aggregator.init(part)

        return init

    @staticmethod
    def _on_host(*state: Any, version: int) -> FragmentState:
        # Copies, because an array of JAX on the CPU can share the memory of its NumPy view.
        params, outer_state, aggregator_state = jax.tree.map(lambda x: np.array(x), state)
        return FragmentState(params, outer_state, aggregator_state, version)

    def newer_than(self, versions: Sequence[int]) -> list[int]:
        """Return the fragments that are newer than some versions, those merged first in front."""
        newer = [p for p, state in enumerate(self.fragments) if state.version > versions[p]]
        return sorted(newer, key=lambda p: (self.fragments[p].version, p))


def check_finite(state: FragmentState, p: int, merge: int) -> None:
    """Raise a NonFiniteError if a merge of fragment p made a parameter NaN or infinite."""
    if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params)):
        raise NonFiniteError(
            f"merge {merge} made a parameter of fragment {p} NaN or infinite, expected finite "
            "values. The state before it is saved. Use a smaller outer learning rate, or a robust "
            "aggregator."
        )

"""The model of one island: its inner steps, its unsent progress, and the fragments it receives."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import Params, Report
from fedpax.islands.fragment_format import FragmentFormat, model_axes
from fedpax.processes.communication import Broadcast
from fedpax.training.compiled_round import run_state_shardings, with_shardings
from fedpax.training.experiment import Run


class LocalState(NamedTuple):
    """The state of an island."""

    params: Params  # y
    # The model r, so that the unsent progress is r - y: each fragment as last received or sent.
    sent_params: Params
    inner_optimizer_state: optax.OptState
    # With error feedback, the float32 part of the updates that the codec dropped; else None.
    residual: Params | None


class LocalModel:
    """An island's state on its own mesh, and the compiled functions that change it."""

    # For each fragment p, with r the state's `sent_params`:
    #     send:      Delta_p = r_p - y_p;   r_p <- y_p
    #     receive:   y_p <- x_p + (y_p - r_p);   r_p <- x_p
    # Thus every inner step is part of exactly one Delta_p. `encode` returns before its arrays are
    # computed. Every device holds the whole fragment while it is encoded or received. All processes
    # must call the same functions in the same order. States are donated.

    def __init__(self, run: Run) -> None:
        assert run.algorithm.parts is not None
        self._parts = run.algorithm.parts
        params = jax.eval_shape(run.init, jax.random.key(0))
        self._split = self._parts.make_fragments(params)
        self.formats = [
            FragmentFormat(self._parts, jax.eval_shape(part.take, params)) for part in self._split
        ]
        shapes = jax.eval_shape(self._make_state, params)
        self._shardings = run_state_shardings(run, params, shapes, self._parts.islands)
        self.shapes: Any = with_shardings(shapes, self._shardings)
        self._broadcasts = [
            {name: Broadcast(run.mesh, like) for name, like in form.shapes.items()}
            for form in self.formats
        ]
        replicated = NamedSharding(run.mesh, PartitionSpec())
        self._init = jax.jit(
            lambda key: self._make_state(run.init(key)), out_shardings=self._shardings
        )
        self._steps = jax.jit(
            self._take_steps, donate_argnums=0, out_shardings=(self._shardings, replicated)
        )
        self._encode = [
            jax.jit(
                functools.partial(self._encode_fragment, p),
                donate_argnums=0,
                out_shardings=(self._shardings, replicated),
            )
            for p in range(len(self.formats))
        ]
        self._receive = [
            jax.jit(
                functools.partial(self._receive_fragment, p),
                donate_argnums=0,
                out_shardings=self._shardings,
            )
            for p in range(len(self.formats))
        ]
        self._forget = jax.jit(
            self._forget_progress,
            donate_argnums=0,
            static_argnums=1,
            out_shardings=self._shardings,
        )

    def init(self) -> LocalState:
        """Return a state whose parameters are replaced by the syncer's before the island trains."""
        state: LocalState = self._init(jax.random.key(0))
        return state

    def take_steps(
        self, state: LocalState, batches: chex.ArrayTree, start: int, *frozen: Any
    ) -> tuple[LocalState, Report]:
        """Take the S inner steps of a phase, one per batch from `start` on."""
        new: tuple[LocalState, Report] = self._steps(state, batches, start, *frozen)
        return new

    def encode(
        self, state: LocalState, p: int, shard: int, count: int
    ) -> tuple[LocalState, dict[str, jax.Array]]:
        """Encode the unsent progress of fragment p, and count it as sent."""
        new: tuple[LocalState, dict[str, jax.Array]] = self._encode[p](state, shard, count)
        return new

    def receive(
        self, state: LocalState, p: int, arrays: Mapping[str, np.ndarray] | None
    ) -> LocalState:
        """Replace fragment p by process 0's outer parameters, and add its unsent progress."""
        rows = {
            name: broadcast.lay_out(None if arrays is None else arrays[name])
            for name, broadcast in self._broadcasts[p].items()
        }
        new: LocalState = self._receive[p](state, rows)
        return new

    def forget(self, state: LocalState, fragments: frozenset[int]) -> LocalState:
        """Drop the unsent progress, and the residual, of some fragments. The state is donated."""
        new: LocalState = self._forget(state, fragments)
        return new

    def _make_state(self, params: Params) -> LocalState:
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
        return LocalState(
            params=params,
            sent_params=jax.tree.map(jnp.copy, params),
            inner_optimizer_state=self._parts.init_inner(params),
            residual=zeros(params) if self._parts.error_feedback else None,
        )

    def _take_steps(
        self, state: LocalState, batches: chex.ArrayTree, start: jax.Array, *frozen: Any
    ) -> tuple[LocalState, Report]:
        batches = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, self._parts.steps_per_sync), batches
        )
        params, inner_state, report = self._parts.inner_steps(
            state.params, state.inner_optimizer_state, batches, None, *frozen
        )
        return state._replace(params=params, inner_optimizer_state=inner_state), report

    def _encode_fragment(
        self, p: int, state: LocalState, shard: jax.Array, count: jax.Array
    ) -> tuple[LocalState, dict[str, jax.Array]]:
        fragment, form = self._split[p], self.formats[p]
        params = fragment.take(state.params)
        gradient = jax.tree.map(
            lambda r, y: r.astype(jnp.float32) - y.astype(jnp.float32),
            fragment.take(state.sent_params),
            params,
        )
        residual = state.residual
        if residual is not None:
            gradient = jax.tree.map(jnp.add, gradient, fragment.take(residual))
        arrays = form.encode(gradient, shard, count)
        if residual is not None:
            sent = form.decode(arrays, shard, count, model_axes())
            left = jax.tree.map(jnp.subtract, gradient, sent)
            residual = fragment.put(residual, left)
        sent_params = fragment.put(state.sent_params, params)
        return state._replace(sent_params=sent_params, residual=residual), arrays

    def _receive_fragment(
        self, p: int, state: LocalState, rows: Mapping[str, jax.Array]
    ) -> LocalState:
        fragment = self._split[p]
        params = fragment.take(state.params)
        arrays = {name: self._broadcasts[p][name].read(x) for name, x in rows.items()}
        new = self.formats[p].from_arrays(arrays)
        new = jax.tree.map(lambda x, y: x.astype(y.dtype), new, params)
        progressed = jax.tree.map(
            lambda x, y, r: x + (y - r), new, params, fragment.take(state.sent_params)
        )
        return state._replace(
            params=fragment.put(state.params, progressed),
            sent_params=fragment.put(state.sent_params, new),
        )

    def _forget_progress(self, state: LocalState, fragments: frozenset[int]) -> LocalState:
        params, residual = state.params, state.residual
        for p in fragments:
            fragment = self._split[p]
            params = fragment.put(params, fragment.take(state.sent_params))
            if residual is not None:
                zeros = jax.tree.map(jnp.zeros_like, fragment.take(residual))
                residual = fragment.put(residual, zeros)
        return state._replace(params=params, residual=residual)

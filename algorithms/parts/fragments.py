"""Fragments of a model: parts of its parameters that are synchronized separately."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator, random_stream
from fedpax.aggregators.aggregator import Weights
from fedpax.aggregators.random_numbers import traced_random_stream
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves, keep_leaves, without_leaves
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.algorithms.parts.tree_arithmetic import subtract
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_map

FragmentFn: TypeAlias = Callable[[str, Any], int | Sequence[int]]
"""An assignment of parameters to fragments: `(path, leaf) -> fragment`, from 0.

`path` is the path of a parameter, such as `"layers/attention/key"`; `leaf` has its shape and dtype.
A sequence assigns each row along the parameter's first axis, such as each layer of a stack. The
rows of one fragment are equally spaced.
"""


class Fragment(NamedTuple):
    """A part of a pytree: some leaves, and of some leaves equally spaced rows of the first axis."""

    # for each leaf, as in `jax.tree.leaves`: its rows, `slice(None)` for all, or None for no part
    rows: tuple[slice | None, ...]
    # for each leaf of the fragment: whether the inner optimizer never moves it. Empty: none is.
    frozen: tuple[bool, ...] = ()
    # for each leaf, as in `rows`: number of rows to move its slice by, which can be traced. Empty:
    # no slice moves.
    offsets: tuple[int | jax.Array, ...] = ()

    def take(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Cut the fragment from a pytree."""
        leaves, structure = jax.tree.flatten(tree)
        parts = [
            None if rows is None else _slice(leaf, rows, offset)
            for leaf, rows, offset in zip(leaves, self.rows, self._offsets(), strict=True)
        ]
        return jax.tree.unflatten(structure, parts)

    def put(self, tree: chex.ArrayTree, part: chex.ArrayTree) -> chex.ArrayTree:
        """Replace the fragment in a pytree."""
        leaves, structure = jax.tree.flatten(tree)
        parts = jax.tree.leaves(part, is_leaf=lambda x: x is None)
        replaced = [
            leaf if rows is None else _replace(leaf, rows, offset, new)
            for leaf, rows, offset, new in zip(
                leaves, self.rows, self._offsets(), parts, strict=True
            )
        ]
        return jax.tree.unflatten(structure, replaced)

    def _offsets(self) -> tuple[int | jax.Array, ...]:
        return self.offsets or (0,) * len(self.rows)


class FragmentRun(NamedTuple):
    """Consecutive fragments of equal shapes: each has the rows of the former, moved equally far."""

    first: Fragment
    steps: tuple[int, ...]  # for each leaf: number of rows between the slices of two fragments
    length: int

    def at(self, index: int | jax.Array) -> Fragment:
        """Return a fragment of the run; `index` can be traced."""
        return self.first._replace(offsets=tuple(step * index for step in self.steps))


def fragment_runs(fragments: Sequence[Fragment]) -> list[FragmentRun]:
    """Divide fragments into runs, each as long as possible."""
    runs: list[FragmentRun] = []
    for before, fragment in zip([None, *fragments], fragments, strict=False):
        steps = None if before is None else _steps_between(before, fragment)
        if steps is not None and (runs[-1].length == 1 or runs[-1].steps == steps):
            runs[-1] = FragmentRun(runs[-1].first, steps, runs[-1].length + 1)
        else:
            runs.append(FragmentRun(fragment, (0,) * len(fragment.rows), 1))
    return runs


def _steps_between(a: Fragment, b: Fragment) -> tuple[int, ...] | None:
    """Return how far each slice of b is from a's slice; None where they have other shapes."""
    steps = []
    for rows, others in zip(a.rows, b.rows, strict=True):
        if rows is None and others is None:
            steps.append(0)
        elif rows is None or others is None or slice(None) in (rows, others):
            return None
        else:
            steps.append(others.start - rows.start)
            if (others.stop - rows.stop, others.step) != (steps[-1], rows.step):
                return None
    return tuple(steps) if a.frozen == b.frozen else None


def layer_fragments(
    num_fragments: int,
    pattern: Literal["strided", "sequential"] = "strided",
    *,
    layers: str = "layers",
) -> FragmentFn:
    """Assign stacked layers to fragments, and all other parameters to the last fragment.

    A parameter belongs to the layers if a key of its path is `layers`. Its first axis is the layer.
    The first P - 1 fragments share the layers: "strided" deals layer l to fragment l mod (P - 1);
    "sequential" gives each fragment adjacent layers.

    Args:
        num_fragments: P, number of fragments. 1: all parameters in one fragment.
        pattern: "strided", the paper's choice, or "sequential".
        layers: the key of the stacked layers.

    Returns:
        The assignment.

    Raises:
        TypeError: `num_fragments` is not an int.
        ValueError: `num_fragments` is below 1, or `pattern` is unknown. When parameters are
            assigned: layers in a sequence, which are not stacked, or too few of them.

    Example:
        >>> stack = jax.ShapeDtypeStruct((6, 8, 8), jnp.float32)
        >>> layer_fragments(4)("layers/kernel", stack)
        [0, 1, 2, 0, 1, 2]
        >>> layer_fragments(4, "sequential")("layers/kernel", stack)
        [0, 0, 1, 1, 2, 2]
        >>> layer_fragments(4)("embedding", stack)
        3

    Reference:
        Douillard et al., arXiv:2501.18512, section 2.2.
    """
    if isinstance(num_fragments, bool) or not isinstance(num_fragments, int):
        raise ArgumentTypeError(
            f"fragments is {num_fragments!r}, expected an int or a function (path, leaf) -> "
            "fragment. Pass for example fragments=4, or layer_fragments(4, 'sequential')."
        )
    if num_fragments < 1:
        raise ArgumentError(f"fragments is {num_fragments}, expected at least 1. Pass fragments=1.")
    if pattern not in ("strided", "sequential"):
        raise ArgumentError(f"pattern is {pattern!r}, expected 'strided' or 'sequential'.")
    groups = num_fragments - 1

    def fragment_of(path: str, leaf: Any) -> int | list[int]:
        keys = path.split("/")
        if not groups or layers not in keys:
            return groups
        below = keys[keys.index(layers) + 1 :]
        if below and below[0].isdigit():
            raise ArgumentError(
                f"fragments is {num_fragments}, and {path} is an entry of a sequence, expected "
                f"stacked layers: arrays whose first axis is the layer. Stack the entries of "
                f"{layers!r}, or pass a function fragments=(path, leaf) -> fragment that reads the "
                "layer from the path."
            )
        count = leaf.shape[0] if leaf.ndim else 1
        if count < groups:
            raise ArgumentError(
                f"fragments is {num_fragments}, but {path} has {count} layers, which {groups} "
                "fragments share; the last one holds the other parameters. Pass at most "
                f"fragments={count + 1}."
            )
        if pattern == "strided":
            return [layer % groups for layer in range(count)]
        return [layer * groups // count for layer in range(count)]

    return fragment_of


def make_fragments(
    fragments: int | FragmentFn,
    params: Params,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Fragment, ...]:
    """Divide parameters into fragments, and mark those that an inner optimizer never moves."""
    fragment_of = fragments if callable(fragments) else layer_fragments(fragments)
    parts = [
        _rows_by_fragment(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, fragment_of)
        for path, leaf in jax.tree.leaves_with_path(params)
    ]
    used = {number for part in parts for number in part}
    count = fragments if isinstance(fragments, int) else max(used, default=0) + 1
    for number in range(count):
        if number not in used:
            raise ArgumentError(
                f"fragment {number} of {count} has no parameters. An int deals the stacked layers "
                "under the key 'layers' to all fragments but the last, which has the parameters "
                "outside of them. For a model without one of these, pass a function "
                "fragments=(path, leaf) -> fragment that uses every number from 0."
            )
    frozen = [False] * len(parts) if optimizer is None else frozen_leaves(optimizer, params)

    def fragment(number: int) -> Fragment:
        rows = tuple(part.get(number) for part in parts)
        held = tuple(f for f, own_rows in zip(frozen, rows, strict=True) if own_rows is not None)
        return Fragment(rows, held if any(held) else ())

    return tuple(map(fragment, range(count)))


def _rows_by_fragment(path: str, leaf: Any, fragment_of: FragmentFn) -> dict[int, slice]:
    """Return the rows of a parameter in each fragment that has some."""
    assigned = fragment_of(path, leaf)
    is_sequence = isinstance(assigned, Iterable)
    entries: Iterable[Any] = assigned if isinstance(assigned, Iterable) else [assigned]
    try:
        numbers = list(map(operator.index, entries))
    except TypeError:
        raise ArgumentTypeError(
            f"fragments: {path} is assigned to {assigned!r}, expected an int, or a sequence of one "
            "int for each row of axis 0. Return the number of the fragment, from 0."
        ) from None
    if not is_sequence:
        rows_of = {numbers[0]: slice(None)}
    else:
        if leaf.shape[:1] != (len(numbers),):
            raise ArgumentError(
                f"fragments: {path} has shape {list(leaf.shape)}, but is assigned to "
                f"{len(numbers)} fragments. Return one number, or one for each row of axis 0."
            )
        rows_of = {number: _spaced_rows(path, number, numbers) for number in set(numbers)}
    if min(numbers, default=0) < 0:
        raise ArgumentError(f"fragments: {path} is in fragment {min(numbers)}. Count from 0.")
    return rows_of


def _spaced_rows(path: str, number: int, numbers: Sequence[int]) -> slice:
    rows = [row for row, assigned in enumerate(numbers) if assigned == number]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if rows != list(range(rows[0], rows[-1] + 1, step)):
        raise ArgumentError(
            f"fragments: rows {rows} of {path} are in fragment {number}, expected equally spaced "
            "rows. Deal the layers as layer_fragments does, or use more fragments."
        )
    return slice(rows[0], rows[-1] + 1, step)


def _slice(leaf: jax.Array, rows: slice, offset: int | jax.Array) -> jax.Array:
    if rows == slice(None):
        return leaf
    if isinstance(offset, jax.Array):
        leaf = jax.lax.dynamic_slice_in_dim(leaf, rows.start + offset, rows.stop - rows.start)
        return jax.lax.slice_in_dim(leaf, 0, None, rows.step, axis=0)
    start, stop = rows.start + offset, rows.stop + offset
    return jax.lax.slice_in_dim(leaf, start, stop, rows.step, axis=0)


def _replace(leaf: jax.Array, rows: slice, offset: int | jax.Array, new: jax.Array) -> jax.Array:
    if rows == slice(None):
        return new
    # Select elementwise, which fuses: an update of slices would become a scatter under vmap.
    before, after = rows.start + offset, leaf.shape[0] - rows.stop - offset
    if is_traced := isinstance(offset, jax.Array):
        before = after = leaf.shape[0] - (rows.stop - rows.start)
    spread = [(before, after, rows.step - 1)] + [(0, 0, 0)] * (new.ndim - 1)

    def pad(x: jax.Array) -> jax.Array:
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), spread)
        if not is_traced:
            return padded
        return jax.lax.dynamic_slice_in_dim(padded, before - rows.start - offset, leaf.shape[0])

    return jnp.where(pad(jnp.ones_like(new, dtype=bool)), pad(new), leaf)


# ---- the server's part of methods that synchronize a model fragment by fragment

State = TypeVar("State", bound=Any)


class FragmentServer(NamedTuple):
    """The outer model of islands, with states for each fragment. Inside a program."""

    # `outer_optimizer_state` and `aggregator_state` have an entry for each fragment.

    optimizer: optax.GradientTransformation
    aggregator: Aggregator  # combines the islands' outer gradients of a fragment

    def init(
        self, params: Params, fragments: Sequence[Fragment]
    ) -> tuple[tuple[optax.OptState, ...], tuple[Any, ...]]:
        """Return the states of the optimizer and of the aggregator for each fragment."""
        parts = [fragment.take(params) for fragment in fragments]
        aggregators = [without_leaves(self.aggregator, fragment.frozen) for fragment in fragments]
        states = (a.init(part) for a, part in zip(aggregators, parts, strict=True))
        return tuple(map(self.optimizer.init, parts)), tuple(states)

    def average(
        self, state: State, p: int | jax.Array, fragment: Fragment, weights: Weights
    ) -> tuple[Params, chex.ArrayTree, Metrics]:
        """Combine fragment p of the outer gradients; return the aggregator's new state too."""
        x = fragment.take(state.params)
        gradients = federated_map(lambda y: subtract(x, fragment.take(y)), state.local_params)
        stream = random_stream(p) if isinstance(p, int) else traced_random_stream(p)
        with stream:
            aggregator = without_leaves(self.aggregator, fragment.frozen)
            return aggregator.aggregate(entry(state.aggregator_state, p), gradients, weights)

    def step(
        self, state: State, p: int | jax.Array, fragment: Fragment, delta: Params
    ) -> tuple[tuple[Params, optax.OptState], tuple[Params, optax.OptState]]:
        """Step fragment p along `delta`: fragment and optimizer state, after and before."""
        before = fragment.take(state.params), entry(state.outer_optimizer_state, p)
        x, optimizer_state = optimizer_step(self.optimizer, delta, before[1], before[0])
        return (keep_leaves(fragment.frozen, x, before[0]), optimizer_state), before


class Stacked(NamedTuple):
    """The states of consecutive fragments as arrays with an axis in front, in place of a tuple."""

    states: Any
    first: int  # number of the first fragment


def entry(entries: tuple[Any, ...] | Stacked, p: int | jax.Array) -> Any:
    """Return the state of fragment p."""
    if isinstance(entries, Stacked):
        return jax.tree.map(lambda states: states[p - entries.first], entries.states)
    return entries[p]


def with_entry(entries: tuple[Any, ...] | Stacked, p: int | jax.Array, value: Any) -> Any:
    """Replace the state of fragment p."""
    if isinstance(entries, Stacked):
        put = jax.lax.dynamic_update_index_in_dim
        index = p - entries.first
        states = jax.tree.map(lambda s, new: put(s, new, index, 0), entries.states, value)
        return entries._replace(states=states)
    return (*entries[:p], value, *entries[p + 1 :])


def stack_entries(entries: tuple[Any, ...], first: int, count: int) -> Stacked:
    """Stack the states of some fragments."""
    some = entries[first : first + count]
    return Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *some), first)


def with_stacked(entries: tuple[Any, ...], stacked: Stacked, count: int) -> tuple[Any, ...]:
    """Replace the states of fragments that were stacked."""
    some = [jax.tree.map(lambda s, i=i: s[i], stacked.states) for i in range(count)]
    return (*entries[: stacked.first], *some, *entries[stacked.first + count :])


def are_alike(entries: Sequence[Any]) -> bool:
    """Return whether states have equal structures, shapes and dtypes."""
    kinds = {
        (jax.tree.structure(e), tuple((x.shape, x.dtype) for x in jax.tree.leaves(e)))
        for e in entries
    }
    return len(kinds) == 1

"""The cohort of a round: the batches, weights and indices of its participants, as one value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int, Num

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import any_needs_cast, checked_tree, device_weights, needs_cast
from fedpax.primitives.integer_sums import check_weights
from fedpax.primitives.monoids import weight_dtype

NumSteps: TypeAlias = Int[jax.Array, ""] | None
"""The number of leading batches that a participant trains on. None: all of them."""

MASK = "mask"
"""Name of the field of a dict of batches that marks padding with 0 or False."""

_REMEDY = "Convert it before the cohort is made, for example in a `preprocess` of the data."


class _Fields(NamedTuple):
    """The fields of a `Cohort`, whose constructor checks them."""

    batches: Any
    num_examples: Num[jax.Array | np.ndarray, " participants"] | None = None
    num_steps: Int[jax.Array | np.ndarray, " participants"] | None = None
    client_ids: Int[jax.Array | np.ndarray, " participants"] | None = None
    schedule: Any = None


class Cohort(_Fields):
    """The participants of one round and their batches.

    Islands, and clients of equal size, need only the batches: `Cohort(batches)`.

    If `batches` is a dict with a field `"mask"`, an example (or token) whose mask is 0 or False is
    padding. A step with only padding has no effect. A participant of weight 0 is absent: it changes
    neither the model nor its own state. The weight is 0 if `num_examples` is 0 or negative, without
    a step, and with a negative client id.

    Attributes:
        batches: a pytree of arrays `[participants, steps, batch, ...]`. `"mask"` in a dict:
            bool or number `[participants, steps, batch, ...]`.
        num_examples: number `[participants]`, the weight of each participant in means. Default
            None: every participant with at least one step has the same weight. A negative number
            counts as 0.
        num_steps: int `[participants]`, number of leading batches that a participant trains on.
            Default None: compute every step, and discard steps with only padding. `jax.grad`
            through a round with `num_steps` raises; forward mode works.
        client_ids: int `[participants]`, each client's index in its population, different from one
            another; -1 for an empty slot of the cohort. A method with client state raises for a
            client that is twice; under `jax.jit`, any one of the two new states is stored. To such
            a method, an index not below its `num_clients` is an empty slot. Default None: unknown,
            for algorithms without client state.
        schedule: when participants arrive: `Arrivals`, `ArrivalOrder`, `RegionalOrder` or `Syncs`
            of `fedpax.clients`. Default None: participants are equally fast and never fail.

    Raises:
        TypeError: a NumPy array is not numbers.
        ValueError: JAX cannot hold a value of a NumPy array, such as an int64 beyond int32 without
            `jax_enable_x64` (but a larger `num_examples` is kept in float32); a NumPy array
            `num_examples` has a value that is not finite, or a sum out of the range of float32; or
            one of `num_steps` is below 0 or above the steps of `batches`.

    Example:
        >>> import numpy as np
        >>> x = np.ones((2, 3, 4, 5), np.float32)  # clients, steps, batch, features
        >>> cohort = Cohort({"x": x}, num_examples=np.array([12, 8]), num_steps=np.array([3, 2]))
        >>> cohort.client_ids is None
        True
    """

    __slots__ = ()

    def __new__(
        cls,
        batches: Any,
        num_examples: Num[jax.Array | np.ndarray, " participants"] | None = None,
        num_steps: Int[jax.Array | np.ndarray, " participants"] | None = None,
        client_ids: Int[jax.Array | np.ndarray, " participants"] | None = None,
        schedule: Any = None,
    ) -> Self:
        """Make a cohort, and check that JAX can hold the values of its NumPy arrays."""
        # Here, because jax.jit would wrap large integers.
        fields = batches, num_examples, num_steps, client_ids, schedule
        if any_needs_cast(fields):
            batches = checked_tree(batches, "cohort.batches", _REMEDY)
            if needs_cast(num_examples):
                num_examples = device_weights(num_examples, "cohort.num_examples")
            num_steps = checked_tree(num_steps, "cohort.num_steps", _REMEDY)
            client_ids = checked_tree(client_ids, "cohort.client_ids", _REMEDY)
            schedule = checked_tree(schedule, "cohort.schedule", _REMEDY)
            fields = batches, num_examples, num_steps, client_ids, schedule
        if isinstance(num_examples, np.ndarray):
            _check_sum_of_weights(num_examples)
        if isinstance(num_steps, np.ndarray) and num_steps.ndim == 1:
            _check_num_steps(num_steps, batches)
        return tuple.__new__(cls, fields)  # faster than the method of NamedTuple

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # `__new__` checks
        return cls(*iterable)


def check_cohort(
    algorithm: str,
    cohort: Any,
    num_participants: int,
    schedule_type: type | None = None,
    *,
    size_argument: str | None = "cohort_size",
) -> None:
    """Check that the argument of a round is a `Cohort` with consistent shapes.

    Args:
        algorithm: the algorithm's name, for the message.
        cohort: the second argument of the algorithm's `round`.
        num_participants: size of the algorithm's placement.
        schedule_type: the type of schedule that the algorithm takes. Default None: it takes none.
        size_argument: the algorithm's argument that is its number of participants, for the message.
            None: it has no such argument. Default "cohort_size".

    Raises:
        TypeError: `cohort` is not a `Cohort`, the dtype of `num_steps` or `client_ids` is not an
            integer dtype, or `schedule` has another type.
        ValueError: no batches, a leaf without the axes `[participants, steps, batch]`, no steps or
            different numbers of them, or a field or schedule without the axis `[participants]`.

    Example:
        >>> check_cohort("fedavg", {"x": np.ones((2, 1))}, 2)
        Traceback (most recent call last):
            ...
        fedpax.errors.ArgumentTypeError: fedavg(): the second argument of round is a dict, ...
    """
    if not isinstance(cohort, Cohort):
        raise ArgumentTypeError(
            f"{algorithm}(): the second argument of round is a {type(cohort).__name__}, expected a "
            "fedpax.Cohort. Pass fedpax.Cohort(batches), with num_examples= and num_steps= if "
            "clients differ."
        )
    leaves = jax.tree.leaves_with_path(cohort.batches)
    if not leaves:
        raise ArgumentError(
            f"{algorithm}(): cohort.batches has no arrays, expected leaves of shape "
            f"[{num_participants}, steps, batch, ...]."
        )
    num_steps: dict[int, str] = {}
    for path, leaf in leaves:
        shape = np.shape(leaf)
        name = f"cohort.batches{jax.tree_util.keystr(path)}"
        if len(shape) < 2 or shape[0] != num_participants:
            remedy = _size_remedy(algorithm, leaves, num_participants, size_argument)
            raise ArgumentError(
                f"{algorithm}(): {name} has shape {list(shape)}, expected [{num_participants}, "
                f"steps, batch, ...]: {num_participants} is the number of participants of "
                f"{algorithm}. {remedy}"
            )
        if shape[1] == 0:
            raise ArgumentError(
                f"{algorithm}(): {name} has shape {list(shape)}, expected at least one step along "
                "axis 1. Give every participant at least one batch, or leave the round out."
            )
        num_steps.setdefault(shape[1], name)
    if len(num_steps) > 1:
        counts = " and ".join(f"{name} has {steps}" for steps, name in sorted(num_steps.items()))
        raise ArgumentError(
            f"{algorithm}(): the leaves of cohort.batches have different numbers of steps (axis "
            f"1): {counts}. Pad the shorter ones, and mark the padding in a field {MASK!r}."
        )
    for field in ("num_examples", "num_steps", "client_ids"):
        value = getattr(cohort, field)
        if value is None:
            continue
        if not hasattr(value, "shape") and not isinstance(value, int | float):
            raise ArgumentTypeError(
                f"{algorithm}(): cohort.{field} is a {type(value).__name__}, expected an array "
                f"[{num_participants}]. Convert it with jnp.asarray."
            )
        if np.shape(value) != (num_participants,):
            raise ArgumentError(
                f"{algorithm}(): cohort.{field} has shape {list(np.shape(value))}, expected "
                f"[{num_participants}]: one entry for each participant."
            )
        dtype = jax.numpy.result_type(value)
        if field != "num_examples" and not jax.numpy.issubdtype(dtype, jax.numpy.integer):
            raise ArgumentTypeError(
                f"{algorithm}(): cohort.{field} has dtype {dtype}, expected integers. Cast it with "
                ".astype(int)."
            )
    if cohort.schedule is not None:
        _check_schedule(algorithm, cohort.schedule, num_participants, schedule_type)
    _check_batch_axis(algorithm, leaves)


def check_distinct_clients(
    place: str,
    client_ids: Any,
    remedy: str = "Or give the client's examples as one participant.",
) -> None:
    """Raise if a client is twice in a cohort: only one of its new states could be stored."""
    if isinstance(client_ids, jax.core.Tracer):
        return
    if isinstance(client_ids, jax.Array) and not client_ids.is_fully_addressable:
        return
    ids = np.sort(np.asarray(client_ids), axis=None)
    repeated = ids[1:][(ids[1:] == ids[:-1]) & (ids[1:] >= 0)]
    if repeated.size:
        raise ArgumentError(
            f"{place} has the client {repeated[0]} more than once, expected each client once in a "
            "round: only one of its new states could be stored. Draw clients without replacement, "
            f"as fedpax.data.ClientSampler does. {remedy}"
        )


def _check_num_steps(num_steps: Any, batches: Any) -> None:
    """Raise if a number of steps is negative, or above the steps of the batches."""
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batches)]
    steps = [shape[1] for shape in shapes if len(shape) > 1 and shape[0] == len(num_steps)]
    if not steps:  # the round checks the shapes
        return
    wrong = np.flatnonzero((num_steps < 0) | (num_steps > max(steps)))
    if wrong.size:
        raise ArgumentError(
            f"cohort.num_steps[{wrong[0]}] is {num_steps[wrong[0]]}, expected from 0 to "
            f"{max(steps)}, the number of steps (axis 1) of cohort.batches. Give each participant "
            "the number of batches that it trains on; leave num_steps out if it is all of them."
        )


def _check_sum_of_weights(weights: np.ndarray[Any, Any]) -> None:
    """Raise if weights are not finite or sum out of range: in `jax.jit` the mean would be NaN."""
    if not jax.numpy.issubdtype(weights.dtype, np.floating):
        return
    positive = np.maximum(weights, 0).astype(np.float64)
    if not np.all(np.isfinite(positive)):
        value = weights[~np.isfinite(positive)].flat[0]
        raise ArgumentError(
            f"cohort.num_examples has the value {value}, expected finite numbers. Leave out "
            "participants with unknown numbers of examples, or give them the number 0."
        )
    count, dtype = int(np.count_nonzero(positive)), weight_dtype(weights.dtype)
    check_weights(float(positive.sum()), count, dtype, "cohort.num_examples has")


def _check_batch_axis(algorithm: str, leaves: list[Any]) -> None:
    """Raise if a leaf has no axis of examples: each example would be a step."""
    for path, leaf in leaves:
        shape, name = list(np.shape(leaf)), f"cohort.batches{jax.tree_util.keystr(path)}"
        is_key = hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if len(shape) == 2 and not is_key:  # a step can have one key, as for dropout
            raise ArgumentError(
                f"{algorithm}(): {name} has shape {shape}, expected [participants, steps, batch, "
                "...]: without the axis of steps, each example would be trained on as a step. "
                "Add it: for one step on all examples, pass jax.tree.map(lambda x: x[:, None], "
                "batches)."
            )


def _size_remedy(
    algorithm: str, leaves: list[Any], num_participants: int, size_argument: str | None
) -> str:
    """Return the remedy for leaves that are not of `num_participants` participants."""
    shapes = [np.shape(leaf) for _, leaf in leaves]
    sizes = {shape[0] if len(shape) > 1 else 0 for shape in shapes}
    if len(sizes) > 1 or 0 in sizes:
        return "Stack the participants' batches along the first axis."
    wanted = f"a cohort of {num_participants} participant{'s' if num_participants > 1 else ''}"
    if size_argument is None:
        return f"Pass {wanted}."
    return f"Pass {size_argument}={sizes.pop()} to {algorithm}, or {wanted} to the round."


def _check_schedule(
    algorithm: str, schedule: Any, num_participants: int, schedule_type: type | None
) -> None:
    """Check a schedule that is not None."""
    given = type(schedule).__name__
    if schedule_type is None:
        raise ArgumentTypeError(
            f"{algorithm}(): cohort.schedule is a {given}, but {algorithm} is synchronous. Leave "
            "schedule=None, or use an asynchronous method, such as fedbuff or async_diloco."
        )
    if not isinstance(schedule, schedule_type):
        raise ArgumentTypeError(
            f"{algorithm}(): cohort.schedule is a {given}, expected a {schedule_type.__name__} of "
            "fedpax.clients. fedpax.simulation makes one for each method."
        )
    for path, array in jax.tree.leaves_with_path(schedule):
        if np.shape(array)[:1] != (num_participants,):
            name, shape = jax.tree_util.keystr(path), list(np.shape(array))
            raise ArgumentError(
                f"{algorithm}(): cohort.schedule{name} has shape {shape}, expected "
                f"{num_participants} participants along axis 0. Pass the schedule of one round."
            )


class CohortStream(Protocol):
    """An endless iterator over cohorts whose position can be saved and restored.

    Every round's cohort has the same structure, shapes and dtypes. Its leaves are NumPy arrays that
    later rounds do not overwrite. Every process draws the same whole cohort, or leaves of the
    global shape of which it can index only its own rows (`fedpax.data.LocalRows`).
    """

    def __next__(self) -> Cohort:
        """Return the cohort of the next round."""
        ...

    def get_state(self) -> dict[str, Any] | bytes:
        """Return the position, in values of JSON or bytes; None: another process knows it."""
        ...

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        ...


@runtime_checkable
class IslandStream(CohortStream, Protocol):
    """A stream of cohorts that can read the rows of one island alone."""

    def keep_island(self, island: int) -> None:
        """Read only the rows of one island from now on; other rows cannot be indexed then."""
        ...


@runtime_checkable
class PackedStream(CohortStream, Protocol):
    """A stream whose cohorts have fewer bytes on their way to the devices.

    `unpack(next_packed())` is `next(stream)`.
    """

    def next_packed(self) -> Cohort:
        """Return the cohort of the next round as it is sent to the devices."""
        ...

    def unpack(self, cohort: Cohort) -> Cohort:
        """Complete a cohort of `next_packed` that is on the devices, with equal shardings."""
        ...


@runtime_checkable
class IdentifiedStream(CohortStream, Protocol):
    """A stream that can tell whether another process has the same data.

    Otherwise processes with different data would each leave out most of their own.
    """

    def fingerprint(self) -> dict[str, str]:
        """Return each data set's size and a checksum of a sample; equal on all machines."""
        ...


def fingerprint(stream: CohortStream) -> dict[str, str]:
    """Return the fingerprint of a stream's data; empty if the stream does not tell."""
    return stream.fingerprint() if isinstance(stream, IdentifiedStream) else {}

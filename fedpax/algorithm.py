"""The contract of a federated method: a pair of pure functions, as in optax."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from typing_extensions import TypeVar  # with defaults, which `typing` has from Python 3.13 on

from fedpax.aggregators import Aggregator
from fedpax.aggregators.codecs import Codec
from fedpax.clients.cohort import MASK, Cohort
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.transforms.marks import LOSS_MASK

Params: TypeAlias = Any
"""The server's model: a pytree of arrays. A loss can name a narrower type."""

Batch: TypeAlias = Any
"""A participant's batch: a pytree of arrays. A loss can name a narrower type."""

State: TypeAlias = Any
"""The state of a method: a NamedTuple of arrays with a field `params`, the server's model."""

StateT = TypeVar("StateT", default=Any)
"""The class of a method's state, such as `FedAvgState`."""

Metrics: TypeAlias = dict[str, jax.Array]
"""Scalars of one round by name; `"loss"` is the mean training loss over the round."""

Scalar: TypeAlias = float | jax.Array
"""A setting that can be traced, to differentiate in it."""

LossFn: TypeAlias = Callable[[Params, Batch], tuple[jax.Array, Metrics | None]]
"""A loss: `(params, batch) -> (scalar loss, dict of scalar metrics, or None)`."""


@dataclasses.dataclass(frozen=True)
class WithGradientNorm:
    """A loss whose gradients are measured: local steps add two metrics to the loss's metrics.

    - `"gradient_norm"`: the Euclidean norm of a participant's gradient in float32, before the
      optimizer clips it; averaged over steps and participants as all metrics are.
    - `"non_finite_step_fraction"`: the fraction of steps whose gradient has NaN or infinity.

    Methods that get their gradients from `fedpax.algorithms.local_steps` report them. Wrap a loss
    last: a function around it hides the wish.
    """

    loss_fn: LossFn

    def __call__(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics | None]:
        """Return the loss and its metrics."""
        return self.loss_fn(params, batch)


class FragmentLike(Protocol):
    """A part of the parameters, such as a `fedpax.algorithms.parts.fragments.Fragment`."""

    def take(self, tree: Any) -> Any:
        """Return the part of a pytree, with None for leaves outside of the part."""
        ...

    def put(self, tree: Any, part: Any) -> Any:
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

    A round has P merges, one per fragment. After every `steps_per_sync` inner steps, an island
    sends the fragment that is merged next. When `quorum` islands have sent it, the syncer waits at
    most `grace_seconds` for other islands that are up, and merges it. A later update is part of the
    next merge of its fragment.

    Attributes:
        islands: number of shards of the data, and the largest number of islands.
        init_inner: `params -> inner_state` of one island.
        inner_steps: `(params, inner_state, batches, num_steps) -> (params, inner_state, report)`
            of one island; leaves of `batches` are `[steps, batch, ...]`. In a run with frozen
            values (`with_frozen_argument`), these values are one more argument.
        make_fragments: `params -> fragments`; only the parameters' structure and shapes are read.
        outer_optimizer: steps each fragment of the outer model, with one state per fragment.
        aggregator: merges the islands' outer gradients of a fragment, weighted by tokens^2 / steps.
        steps_per_sync: this and the further fields as in
            `fedpax.algorithms.decoupled_diloco_parts`.
    """

    islands: int
    init_inner: Callable[[Any], optax.OptState]
    inner_steps: Callable[..., tuple[Any, optax.OptState, Report]]
    make_fragments: Callable[[Any], Sequence[FragmentLike]]
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
    """Return the most phases of S steps that an island takes after its last received merge."""
    if parts.max_steps_ahead is None:
        return 32
    return parts.max_steps_ahead // parts.steps_per_sync


class FederatedAlgorithm(NamedTuple, Generic[StateT]):
    """A federated method: the initial state, and the round that advances it.

    Both are pure functions and can be jitted. The state is a `NamedTuple` whose field `params` is
    the server's model. State that participants keep between rounds has a leading axis of the
    placement's size. `round` returns a state of the same structure, shapes, dtypes and shardings,
    so that the old one can be donated. `init` must then copy `params`: otherwise the round deletes
    the caller's arrays.

    A run can resume with another number of participants: placed values are then averaged or copied
    (`fedpax.checkpoints.resize_weights`). Resuming raises if the state has a property
    `fixed_participants`, the reason against it, such as "each expert belongs to a domain".

    Attributes:
        init: `params -> state`.
        round: `(state, cohort) -> (state, metrics)`. `cohort` is a `fedpax.Cohort`; every leaf of
            `cohort.batches` is `[participants, steps, batch, ...]`. `metrics` is a dict of scalars
            that holds at least `"loss"`, the mean training loss over the round. A metric can also
            be a vector `[participants]`, of which the training loop logs quantiles. The training
            loop adds keys of its own, and raises if a metric has one of these names
            (`RESERVED_METRICS`): `kind`, `round`, `items`, `bytes_across_placement`, `seconds`,
            `input_wait_fraction`, `items_per_second`, `mfu`, `update_norm`, `spikes`,
            `skipped_rounds`, `non_finite_rounds`, `wall_seconds` and its parts `input_seconds`,
            `compile_seconds`, `step_seconds`, `evaluate_seconds`, `save_seconds`, `lost_seconds`. A
            step whose batch is padding alone changes neither state nor metrics.
        parts: the method in parts, for islands with their own runtimes (`fedpax join`). Default
            None: it runs as one program only.
        sent_exactly: what participants send beside their updates that changes the state, in words,
            such as "the changes of the controls". It is summed without the noise of a private
            aggregator, so that the method has no epsilon. Default None: nothing.
        kept_models: `(state, client_ids) -> models [clients, ...]`, if clients keep models of their
            own, which experiments then evaluate. Default None.
        adapted_model: `(state, batches, num_steps) -> model`, if each client makes a model of its
            own from its training batches `[steps, batch, ...]`. Default None.
        unequal_steps: what it means that some clients take many more local steps than others, in
            words that a run prints. Default None: nothing.

    Example:
        Gradient descent on a quadratic, with one participant and one local step:

        >>> from typing import NamedTuple
        >>> import jax, jax.numpy as jnp
        >>> class DescentState(NamedTuple):
        ...     params: jax.Array
        >>> def descend(state, cohort):
        ...     loss_fn = lambda w: jnp.mean((w - cohort.batches) ** 2)
        ...     loss, gradient = jax.value_and_grad(loss_fn)(state.params)
        ...     return DescentState(state.params - 0.5 * gradient), {"loss": loss}
        >>> descent = FederatedAlgorithm(
        ...     init=lambda w: DescentState(jnp.copy(w)), round=jax.jit(descend, donate_argnums=0))
        >>> cohort = Cohort(jnp.full((1, 1, 2), 3.0))  # participants, steps, batch
        >>> state, metrics = descent.round(descent.init(jnp.float32(0.0)), cohort)
        >>> float(state.params), float(metrics["loss"])
        (3.0, 9.0)
    """

    init: Callable[[Params], StateT]
    round: Callable[[StateT, Cohort], tuple[StateT, Metrics]]
    parts: AlgorithmParts | None = None
    sent_exactly: str | None = None
    kept_models: Callable[[StateT, Any], Params] | None = None
    adapted_model: Callable[[StateT, Any, Any], Params] | None = None
    unequal_steps: str | None = None


_calls_with_mask: ContextVar[list[LossFn] | None] = ContextVar("calls_with_mask", default=None)


@contextlib.contextmanager
def marked_masks() -> Iterator[list[LossFn]]:
    """Mark the masks that losses get, for `has_live_mark`, and list the losses that get one."""
    calls: list[LossFn] = []
    token = _calls_with_mask.set(calls)
    try:
        yield calls
    finally:
        _calls_with_mask.reset(token)


def loss_and_metrics(loss_fn: LossFn, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Call a loss function, check what it returns, and collect its metrics."""
    # Returns the loss, and a dict of the metrics with `"loss"`.
    calls = _calls_with_mask.get()
    if calls is not None and isinstance(batch, dict) and MASK in batch:
        calls.append(loss_fn)
        batch = {**batch, MASK: checkpoint_name(batch[MASK], LOSS_MASK)}
    returned = loss_fn(params, batch)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ArgumentTypeError(
            f"loss_fn returned {describe_value(returned)}, expected a pair (loss, metrics). Return "
            "loss, {'accuracy': accuracy}, or loss, None."
        )
    loss, aux = returned
    if not is_scalar(loss) or jnp.iscomplexobj(loss):
        raise ArgumentTypeError(
            f"loss_fn returned a loss of {describe_value(loss)}, expected a scalar. Average it "
            "over the batch, for example with jnp.mean."
        )
    return loss, as_metrics(loss, aux)


def as_metrics(loss: jax.Array, aux: Mapping[str, jax.Array] | None) -> Metrics:
    """Add the loss to the metrics that a loss function returns beside it."""
    if aux is None:
        return {"loss": loss}
    if not isinstance(aux, Mapping):
        raise ArgumentTypeError(
            f"loss_fn returned {describe_value(aux)} beside the loss, expected a dict of metrics. "
            "Return loss, {'accuracy': accuracy}, or loss, None."
        )
    if "loss" in aux:
        raise ArgumentError(
            "loss_fn returned a metric called 'loss', the name under which its loss is reported. "
            "Leave it out, or rename it."
        )
    for name, value in aux.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"loss_fn returned a metric named {name!r}, expected a text. Return for example "
                "loss, {'accuracy': accuracy}."
            )
        if not is_scalar(value) or jnp.iscomplexobj(value):
            raise ArgumentTypeError(
                f"loss_fn returned a metric {name!r} of {describe_value(value)}, expected a "
                "scalar. Average it over the batch, for example with jnp.mean."
            )
    return {**aux, "loss": loss}


def has_params_field(state: State) -> bool:
    """Return whether a state stores its model, and does not compute it from its fields."""
    return "params" in getattr(state, "_fields", ("params",))


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number or an array without axes, which can be traced."""
    return isinstance(value, int | float) or (hasattr(value, "dtype") and value.ndim == 0)


def describe_value(value: Any) -> str:
    """Name a value's type for a message, with its shape if it is an array."""
    if hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"

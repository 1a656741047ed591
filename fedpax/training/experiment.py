"""What is trained: the settings of a loop, an experiment as a dataclass, and a run it builds."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from fedpax.parallel.mesh import MeshConfig
from fedpax.training.algorithm import FederatedAlgorithm, Params


class BatchStream(Protocol):
    """An endless iterator over rounds of batches that can say where it stands.

    Every item is a pytree of NumPy arrays, each a fresh one (the loop still reads it while the
    next item is being made), of the same shapes and dtypes in every round. With several
    processes each of them draws the same, whole item and keeps the part of its own devices.
    """

    def __next__(self) -> Any:
        """Returns the batches of the next round."""
        ...

    def get_state(self) -> dict[str, Any] | bytes:
        """Returns where the stream stands, as values that JSON can hold, or as bytes."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to where the stream stood when ``get_state`` returned ``state``."""
        ...


class Shardings(NamedTuple):
    """Where a run's arrays live.

    Attributes:
        params: a tree of ``NamedSharding`` with the structure of the parameters.
        batches: one ``NamedSharding`` for every leaf of a round's batches, such as
            ``P("clients")``, or a tree of them (a prefix of the batches' structure).
        state: changes what is derived from them for the algorithm's state, a tree of its
            structure, where the state holds more than what belongs to a parameter or to each
            participant; returns the tree, or a prefix of it. With a client store in the state:
            ``lambda derived: derived._replace(store=NamedSharding(mesh, P("clients")))``.
    """

    params: Any
    batches: NamedSharding | Any
    state: Callable[[Any], Any] | None = None


class Run(NamedTuple):
    """Everything that the loop needs to train; built by :meth:`Experiment.build`.

    Attributes:
        algorithm: the method.
        init: ``key -> params``, fresh parameters; traced under ``jit``.
        batches: the training data, one item a round.
        evaluate: ``params -> {"loss": ..., ...}``, metrics on held-out data as Python floats.
        mesh: the mesh that is set while the run is traced and run.
        shardings: where parameters and batches live on the mesh.
        items_per_round: how many tokens (or examples) all participants together see a round.
        placement: the name of the placement, ``"clients"`` or ``"islands"``: the loop counts the
            bytes that cross this axis of the mesh.
        batch_shapes: the shapes and dtypes of a round's batches, a tree of
            ``jax.ShapeDtypeStruct``, so that the round compiles without the data (``fedpax plan``);
            None where only the data tell.
        flops_per_token: floating-point operations of the model for a training token, forward and
            backward, without what is computed again; None if unknown.
    """

    algorithm: FederatedAlgorithm
    init: Callable[[jax.Array], Params]
    batches: BatchStream
    evaluate: Callable[[Params], dict[str, float]]
    mesh: Mesh
    shardings: Shardings
    items_per_round: int
    placement: str
    batch_shapes: Any = None
    flops_per_token: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The settings of the training loop.

    Attributes:
        rounds: how many rounds to train.
        evaluate_every: rounds between evaluations on held-out data; 0 for the last round alone.
        checkpoint_every: rounds between checkpoints; 0 for the last round alone. A run that is
            killed goes on from its last checkpoint.
        keep_checkpoints: how many of the newest checkpoints are kept.
        seed: seed of the parameters.
        stop_on_non_finite: stop with an error when the loss or a parameter is NaN or infinite.

    Example:
        >>> TrainingConfig(rounds=100, evaluate_every=10, checkpoint_every=20).keep_checkpoints
        3
    """

    rounds: int
    evaluate_every: int
    checkpoint_every: int
    keep_checkpoints: int = 3
    seed: int = 0
    stop_on_non_finite: bool = True

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: for a number that is too small.
        """
        least = {"rounds": 1, "evaluate_every": 0, "checkpoint_every": 0, "keep_checkpoints": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(
                    f"training.{name}={value} is too small: expected at least {lowest}. "
                    f"Set --training.{name} to {lowest} or more."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """A configuration that can be built into a run; the base of every experiment.

    A subclass is a frozen dataclass whose fields are numbers, strings, booleans, ``None``, tuples
    and further frozen dataclasses of such, so that it can be overridden from the command line and
    written to ``config.json``. A zero-argument function that returns one *is* the experiment's
    name; a variant is ``dataclasses.replace`` of another.

    Attributes:
        training: the settings of the loop.
        mesh: the sizes of the mesh's axes.
    """

    training: TrainingConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    @abc.abstractmethod
    def build(self) -> Run:
        """Makes the model, data, algorithm and mesh that the configuration describes.

        Data that are read when they are first asked for, and not here, let a run be planned on a
        machine that does not have them.
        """

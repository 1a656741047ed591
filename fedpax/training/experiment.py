"""Experiments: a configuration as a frozen dataclass, and the run that it builds."""

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import chex
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import FederatedAlgorithm, Metrics, Params, State
from fedpax.checkpoints.exports import write_orbax
from fedpax.checks import check_fields
from fedpax.clients.cohort import Cohort, CohortStream
from fedpax.errors import ArgumentError
from fedpax.parallel.axes import ShardingTree
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.parallel.mesh_sizes import ShardedSize, follow
from fedpax.run_files.configuration import without_paths, write_configuration
from fedpax.training.client_metrics import ClientMetrics
from fedpax.training.training_config import TrainingConfig


class StoredParams(NamedTuple):
    """Parameters that a run reads from a folder."""

    # where they are, for messages, such as `"model.weights=models/llama"`. Empty if no folder is
    # given; `load` then raises.
    source: str
    # their shapes and dtypes, a tree of `jax.ShapeDtypeStruct` with shardings
    shapes: chex.ArrayTree
    # reads them onto these shardings. May be called several times.
    load: Callable[[], chex.ArrayTree]


def with_frozen_argument(
    make: Callable[[chex.ArrayTree], FederatedAlgorithm], shapes: chex.ArrayTree
) -> FederatedAlgorithm:
    """Make an algorithm whose round takes the frozen values of its loss as an argument.

    Its `round(state, cohort, frozen)` reads `Run.frozen`; inner steps of its `parts` take them
    last.
    """

    def round_with_frozen(
        state: State, cohort: Cohort, frozen: chex.ArrayTree
    ) -> tuple[State, Metrics]:
        return make(frozen).round(state, cohort)

    def inner_steps_with_frozen(*arguments: Any) -> Any:
        *inputs, frozen = arguments
        parts = make(frozen).parts
        assert parts is not None
        return parts.inner_steps(*inputs)

    frozen_round: Any = round_with_frozen
    algorithm = make(shapes)
    parts = algorithm.parts
    if parts is not None:
        parts = parts._replace(inner_steps=inner_steps_with_frozen)
    return algorithm._replace(round=frozen_round, parts=parts)


HeldoutMetrics: TypeAlias = Mapping[str, float | jax.Array]
"""Metrics on held-out data by name, with `"loss"`."""


class Shardings(NamedTuple):
    """The shardings of a run's arrays.

    Attributes:
        params: a `NamedSharding`, or a tree of them that is a prefix of the parameters' structure.
        cohort: the same for the leaves of a cohort, such as `P("clients")`.
        state: the shardings of the algorithm's state. Default None: derive them from the
            parameters' shardings. A function `derived -> shardings` overrides some, such as
            `lambda derived: derived._replace(table=NamedSharding(mesh, P("clients")))`.
    """

    params: ShardingTree
    cohort: ShardingTree
    state: Callable[[ShardingTree], ShardingTree] | None = None


class Run(NamedTuple):
    """Everything that the training loop needs, as built by `Experiment.build`.

    Attributes:
        algorithm: the method.
        init: `key -> params`, new parameters; traced under `jit`.
        cohorts: the training data, one cohort per round.
        evaluate: `params -> {"loss": ..., ...}`, metrics on held-out data: floats, arrays of one
            number, or vectors with a value for each client, of which quantiles are logged.
        mesh: the mesh that is set while the run is traced and executed.
        items_per_round: tokens or examples of all participants in a round.
        placement: `"clients"` or `"islands"`, also the mesh axis of the logged
            `bytes_across_placement`.
        shardings: the shardings of parameters, cohorts and state. Default None: each device holds
            the whole model, and the mesh axis of the placement shards cohorts.
        item_unit: the unit of `items_per_round`.
        cohort_shapes: a tree of `jax.ShapeDtypeStruct`, to compile the round without data
            (`fedpax plan`). Default None: unknown.
        flops_per_item: floating-point operations of the model per item, forward and backward,
            without recomputation. Default None: no model FLOPs utilization (MFU) is reported.
        flops_convention: what these count, printed with the MFU.
        initial: the initial parameters, if they are read from a folder. Default None: make them by
            `init`.
        frozen: values that the round does not change, the last argument of the round
            (`with_frozen_argument`). Default None: none.
        whole_model: `params -> parameters of the whole model`, such as adapters merged. Default
            None: `params` are the whole model.
        compiler_options: options of the compiler, such as `fedpax.parallel.overlap_options(mesh)`.
            Default None: the defaults.
        evaluate_state: `state -> metrics`, further metrics of evaluations. Default None: none.
        evaluate_clients: `params -> metrics of each client`, for `fedpax evaluate --by_client`.
            Default None: the held-out data have no clients.
        evaluate_own_models: `state -> metrics of each client` of the clients' own models. Default
            None: clients have no own models.
        heldout_fingerprint: `() -> texts by data set`, which identify the held-out data: processes
            of a job compare them. Default None: none are compared.
        notes: lines to print at the start.
        cautions: the notes that an evaluation prints too.
    """

    algorithm: FederatedAlgorithm
    init: Callable[[jax.Array], Params]
    cohorts: CohortStream
    evaluate: Callable[[Params], HeldoutMetrics]
    mesh: Mesh
    items_per_round: int
    placement: str
    shardings: Shardings | None = None
    item_unit: Literal["tokens", "examples"] = "examples"
    cohort_shapes: chex.ArrayTree | None = None
    flops_per_item: float | None = None
    flops_convention: str = "forward and backward, without recomputation"
    initial: StoredParams | None = None
    frozen: StoredParams | None = None
    whole_model: Callable[[Params], Params] | None = None
    compiler_options: Mapping[str, str] | None = None
    evaluate_state: Callable[[Any], HeldoutMetrics] | None = None
    evaluate_clients: Callable[[Params], ClientMetrics] | None = None
    evaluate_own_models: Callable[[Any], ClientMetrics] | None = None
    heldout_fingerprint: Callable[[], Mapping[str, str]] | None = None
    notes: Sequence[str] = ()
    cautions: Sequence[str] = ()

    @property
    def resolved_shardings(self) -> Shardings:
        """The shardings, or their default."""
        if self.shardings is not None:
            return self.shardings
        axis = self.placement if self.placement in self.mesh.axis_names else None
        return Shardings(
            params=NamedSharding(self.mesh, PartitionSpec()),
            cohort=NamedSharding(self.mesh, PartitionSpec(axis)),
        )


def check_run(run: object, experiment_name: str) -> None:
    """Check that `Experiment.build` returned a run that the training loop can use."""
    if not isinstance(run, Run):
        raise ArgumentError(
            f"{experiment_name}.build returns a {type(run).__name__}, expected a "
            "fedpax.training.experiment.Run. Return one from build."
        )
    for field, value, methods, remedy in (
        ("algorithm", run.algorithm, ("init", "round"), "Call the method: fedavg(loss_fn, ...)."),
        (
            "cohorts",
            run.cohorts,
            ("__next__", "get_state", "set_state"),
            "Use fedpax.data.FunctionRounds. The state is a place in the data, such as the round.",
        ),
    ):
        if lacking := [name for name in methods if not hasattr(value, name)]:
            raise ArgumentError(
                f"Run.{field} is a {type(value).__name__} without {', '.join(lacking)}, expected "
                f"an object with {', '.join(methods)}. {remedy}"
            )
    if run.items_per_round < 1:
        raise ArgumentError(
            f"Run.items_per_round={run.items_per_round}, expected a positive number. Give the "
            "tokens or examples of a round, of all participants together."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """A configuration that can be built into a run; the base class of every experiment.

    A subclass is a frozen dataclass. Its fields are numbers, strings, booleans, `None`, tuples and
    frozen dataclasses of these, which the command line can override and `config.json` can store.

    Attributes:
        training: the settings of the training loop.
        mesh: the sizes of the mesh's axes; -1 takes the remaining devices. Sizes that are not
            stated follow from `sharded_sizes`; without them they are 1.
    """

    training: TrainingConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        """Check the fields of types such as `fedpax.checks.Count`."""
        check_fields(self, "")

    def resolve(
        self, default: Self, given: Collection[str], job_log_dir: str | Path | None
    ) -> Self:
        """Fill in fields that depend on what the command line set. By default there are none.

        `default` is the experiment before, `given` has the paths of the fields that the command
        line set, and `job_log_dir` is the run's folder, which may be missing, or None.
        """
        del default, given, job_log_dir
        return self

    def sharded_sizes(self) -> Sequence[ShardedSize]:
        """Return the sizes that axes of the mesh divide, from which `make_mesh` chooses."""
        return ()

    def make_mesh(self) -> Mesh:
        """Make the mesh of all available devices.

        Raises:
            MeshSizeError: the sizes do not fit the devices; the message names a field to change.
        """
        devices = available_devices()
        slices = {getattr(device, "slice_index", None) for device in devices}
        return follow(self.mesh, self.sharded_sizes(), len(devices), len(slices)).make()

    def write_model(self, folder: Path, params: Params, exp: str) -> None:
        """Write the model of a checkpoint to a new folder, for other programs.

        By default an Orbax checkpoint, `params`, and `config.json` without paths of this machine.

        Args:
            folder: the new folder.
            params: the server's model, JAX arrays of this process or NumPy arrays.
            exp: the experiment's name on the command line.
        """
        write_orbax(folder, params)
        write_configuration(folder, without_paths(self), exp)
        self.write_inputs(folder)

    def write_configuration(self, folder: Path, exp: str) -> None:
        """Write `config.json` and the inputs to the folder of a run, or of an exported model."""
        write_configuration(folder, self, exp)
        self.write_inputs(folder)

    def write_inputs(self, folder: Path) -> None:
        """Write what turns raw data into the model's inputs, beside a model. By default nothing.

        `folder` is the folder of the run, or of an exported model.
        """
        del folder

    def read_inputs(self, folder: Path) -> None:
        """Read what `write_inputs` wrote in the run's folder, if it did, before `build`."""
        del folder

    def check_resumable(self, former: Self) -> None:
        """Check that a run of another configuration can continue with this one. By default it can.

        `former` is the run's configuration.
        """
        del former

    @abc.abstractmethod
    def build(self) -> Run:
        """Build the model, the data, the algorithm and the mesh that the configuration describes.

        Read data when they are first used, not here: then `fedpax plan` works without them.
        """

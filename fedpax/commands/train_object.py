"""`fedpax.train`: train an experiment that is a Python object, such as one of a notebook's cell."""

import contextlib
import dataclasses
import functools
import inspect
import re
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from fedpax.algorithm import Params
from fedpax.checkpoints.saved_state import load_params
from fedpax.commands.parts.devices import enable_compilation_cache, provide_devices
from fedpax.errors import ArgumentTypeError, FedpaxError
from fedpax.extras import optional
from fedpax.reports.metric_table import number_or_nan
from fedpax.run_files.configuration import check_is_dataclass
from fedpax.run_files.metrics import RESERVED_METRICS, read_metrics, select
from fedpax.run_files.metrics_log import read_log, spread_rounds
from fedpax.run_files.paths import resolve_checkpoint_dir, resolve_job_log_dir
from fedpax.training.experiment import Experiment
from fedpax.training.trainer import train as train_in_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that `fedpax.train` has trained."""

    experiment: Experiment = dataclasses.field(repr=False)
    folder: Path
    rounds: int  # number of completed rounds; all of them are saved
    # the newest held-out metrics. None: there was no evaluation.
    evaluation: dict[str, float] | None
    # why the run ended before its last round (`training.stop_after`), or None
    stopped_early: str | None = None

    @functools.cached_property
    def params(self) -> Params:
        """The server's model after the last round: NumPy arrays in the structure of `Run.init`."""
        return self._load(round_number=self.rounds)

    @functools.cached_property
    def best_params(self) -> Params:
        """The server's model of the best evaluation, by `training.keep_best`.

        Raises:
            ValueError: `training.keep_best` is None.
        """
        return self._load(best=True)

    def _load(self, **which: Any) -> Params:
        saved_in = resolve_checkpoint_dir(self.folder, self.experiment.training.checkpoint_dir)
        arrays = load_params(saved_in, **which)
        shapes = jax.eval_shape(self.experiment.build().init, jax.random.key(0))
        return ocp.tree.from_flat_dict(ocp.tree.to_flat_dict(arrays), target=shapes)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, see `fedpax.run_files.metrics.read_metrics`."""
        return read_metrics(self.folder)

    def plot(self, *metrics: str) -> "Figure":
        """Draw held-out metrics, by default the loss, over examples, and the loss of training."""
        with optional("plot()"):
            from fedpax.reports.plot import draw_losses  # matplotlib is slow to import

        lines = {self.folder.name: self.metrics}
        return draw_losses(lines, over=["items"], metrics=metrics or ("loss",), training_loss=True)


def train(
    experiment: Experiment,
    job_log_dir: str | Path,
    *,
    allow_config_change: Collection[str] = (),
) -> TrainedRun:
    """Train an experiment in a folder, or resume the run that the folder holds.

    On a CPU, the devices of its mesh are simulated, if JAX is not in use yet. Ctrl-C saves after
    the current round; the same call resumes.

    Args:
        experiment: an instance of a frozen dataclass, a subclass of `fedpax.training.Experiment`.
        job_log_dir: the run's folder.
        allow_config_change: paths of fields that may differ from the folder's configuration, with
            all fields below them. Default: only `training.rounds` may grow, once the run is
            finished.

    Returns:
        The final model and metrics.

    Raises:
        TypeError: `experiment` is not an experiment.
        ConfigurationError: the folder holds another configuration, another process trains there, or
            a field cannot be stored in `config.json`.
        KeyboardInterrupt: Ctrl-C; completed rounds are saved.
        SystemExit: SIGTERM; completed rounds are saved.
        ValueError: there are too few devices, or the algorithm breaks its contract.
        NonFiniteError: the loss or the state is not finite.

    Example:
        >>> import dataclasses, tempfile
        >>> import fedpax
        >>> from fedpax.experiments.fedavg_images import fedavg_digits
        >>> experiment = fedavg_digits()
        >>> training = dataclasses.replace(experiment.training, rounds=2)
        >>> run = fedpax.train(dataclasses.replace(experiment, training=training),
        ...                    tempfile.mkdtemp())
        >>> run.rounds, sorted(run.evaluation), len(run.params)
        (2, ['accuracy', 'loss'], 4)
    """
    check_is_experiment(experiment)
    check_is_dataclass(experiment)
    enable_compilation_cache()
    with _arguments_in_errors():
        if not jax.distributed.is_initialized():  # otherwise the processes' devices are known
            provide_devices(experiment.mesh, experiment.sharded_sizes())
        experiment = experiment.resolve(experiment, (), job_log_dir)
        folder = resolve_job_log_dir(job_log_dir)
        result = train_in_folder(experiment, folder, allow_config_change=allow_config_change)
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if result.signal is not None:
        raise SystemExit(128 + result.signal)
    evaluation = result.evaluation or _logged_evaluation(folder)
    return TrainedRun(experiment, folder, result.rounds, evaluation, result.stopped_early)


@contextlib.contextmanager
def _arguments_in_errors() -> Iterator[None]:
    """Let errors of a run, which name flags, name arguments and fields of the experiment."""
    try:
        yield
    except FedpaxError as error:
        if error.args and isinstance(error.args[0], str):
            error.in_flags = error.in_flags or error.args[0]
            error.args = (in_python(error.args[0]), *error.args[1:])
        raise


def in_python(message: str) -> str:
    """Write a message that names flags with the arguments of `train`, and fields."""
    message = message.replace(
        "Run the command with --help to see all fields.", "Print the experiment to see all fields."
    )
    message = re.sub(
        r"--allow_config_change=([\w,]+(?:\.[\w,]+)*)",
        lambda match: f"allow_config_change={match[1].split(',')}",
        message,
    )
    return re.sub(r"(?<![\w-])--(?=[a-z])", "", message)


def _logged_evaluation(folder: Path) -> dict[str, float] | None:
    """Return the held-out metrics of a run that this process did not have to train."""
    lines = select(read_log(folder, spread_rounds).lines, "evaluation")
    if not lines:
        return None
    metrics = lines[-1].keys() - RESERVED_METRICS
    return {name: number_or_nan(value) for name, value in lines[-1].items() if name in metrics}


def check_is_experiment(value: object) -> None:
    """Check that a value is an experiment."""
    if isinstance(value, Experiment):
        return
    described = f"a {type(value).__name__}"
    remedy = "Pass an instance of a frozen dataclass that inherits from it."
    if isinstance(value, str):
        described = repr(value)
        remedy = f"Pass fedpax.experiments.catalog.find_experiment({value!r})()."
    elif inspect.isclass(value):
        described = f"the class {value.__name__}"
        remedy = f"Make an instance: {value.__name__}(training=TrainingConfig(...))."
    elif callable(value) and hasattr(value, "__name__"):
        described = f"the function {value.__name__}"
        remedy = f"Pass its result: {value.__name__}()."
    raise ArgumentTypeError(
        f"fedpax.train got {described}, expected a fedpax.training.experiment.Experiment. {remedy}"
    )

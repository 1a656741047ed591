"""Runs at the servers of experiment trackers: Weights & Biases, MLflow and trackio."""

import contextlib
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fedpax.errors import ConfigurationError
from fedpax.run_files.configuration import flatten

TrackerName = Literal["wandb", "mlflow", "trackio"]
RunOutcome = Literal["finished", "interrupted", "failed"]

PROJECT = "fedpax"
"""The project of a run, unless the tracker's environment variable names another one."""

SECONDS_TO_CONNECT = 15
SECONDS_TO_FINISH = 20
MLFLOW_BATCH = 1000
"""The largest number of metrics that a server of MLflow takes at once."""
MLFLOW_PARAMS = 100
MLFLOW_LONGEST = 6000


class TrackedLine(NamedTuple):
    """A line of `metrics.jsonl` to send."""

    number: int  # its place among all lines that were sent, from 0
    seconds: float  # when it was written, in seconds since 1970
    line: Mapping[str, Any]


class Description(NamedTuple):
    """A run, as a tracker shows it."""

    folder: Path  # the run's folder, whose name is the run's
    exp: str
    configuration: Mapping[str, Any]

    @property
    def flat(self) -> dict[str, Any]:
        """The fields of the configuration by path."""
        return dict(flatten(dict(self.configuration)))


class TrackedRun(Protocol):
    """A run at a tracker."""

    id: str  # its name for the tracker, with which a later process continues it
    place: str

    def log(self, entries: Sequence[TrackedLine]) -> None:
        """Send lines."""

    def log_checkpoint(self, folder: Path, round_number: int) -> None:
        """Send a folder with `config.json` and one checkpoint."""

    def close(self, outcome: RunOutcome) -> None:
        """Wait until everything is sent, and record how the run ended."""


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, by the names that they have in TensorBoard."""
    kind = line["kind"]
    return {
        f"{kind}/{name}": float(value)
        for name, value in line.items()
        if name != "round" and isinstance(value, int | float)
    }


class WandbRun:
    """A run at Weights & Biases, or with `WANDB_MODE=offline` in the run's folder `wandb/`."""

    def __init__(self, id: str, description: Description) -> None:
        import wandb

        self._wandb, self.id = wandb, id
        online = wandb.setup(wandb.Settings(silent=True)).settings.mode == "online"
        if online and not wandb.login(prompt=False, verify=False):
            # `init` would ask for the key on a terminal.
            raise ConfigurationError(
                "no key of W&B is known. Run `wandb login`, or set WANDB_API_KEY; "
                "WANDB_MODE=offline keeps the metrics in the run's folder"
            )
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=id,
            name=description.folder.name,
            config=dict(description.configuration),
            tags=[description.exp[:64]] if description.exp else None,
            dir=description.folder,
            resume="allow",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                symlink=False,  # a run's folder has no links
                init_timeout=SECONDS_TO_CONNECT,
                finish_timeout=SECONDS_TO_FINISH,
                finish_timeout_raises=True,
            ),
        )
        self._folder = shlex.quote(str(Path(self._run.dir).parent))
        sync = f"upload them with: wandb sync {self._folder}"
        self.place = sync if self._run.offline else str(self._run.url)
        self._run.define_metric("round", hidden=True)
        self._run.define_metric("*", step_metric="round")

    def log(self, entries: Sequence[TrackedLine]) -> None:
        """Send lines. Steps count them: W&B takes no smaller step than the last one."""
        for entry in entries:
            values = {"round": entry.line["round"], **metrics_of(entry.line)}
            self._run.log(values, step=entry.number)

    def log_checkpoint(self, folder: Path, round_number: int) -> None:
        """Send a checkpoint as an artifact of type `model`."""
        artifact = self._wandb.Artifact(f"run-{self.id}", type="model")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            artifact.add_file(str(path), path.relative_to(folder).as_posix())
        self._run.log_artifact(artifact, aliases=["latest", f"round-{round_number}"])
        if not self._run.offline:
            artifact.wait()

    def close(self, outcome: RunOutcome) -> None:
        """Wait until everything is sent; W&B knows finished and failed runs."""
        try:
            self._run.finish(exit_code=0 if outcome == "finished" else 1)
        except TimeoutError as error:
            raise TimeoutError(
                f"no answer in {SECONDS_TO_FINISH} s. Upload it with: wandb sync {self._folder}"
            ) from error


class MlflowRun:
    """A run at the server, or in the database, of `MLFLOW_TRACKING_URI`; Databricks is one."""

    def __init__(self, id: str | None, description: Description) -> None:
        # The thread that calls tries again itself; MLflow would wait for minutes first.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS_TO_CONNECT))
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        self._metric = Metric
        self._client = client = mlflow.MlflowClient()
        if id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            run = client.create_run(
                _experiment_id(client, name),
                run_name=description.folder.name,
                tags={"fedpax.exp": description.exp, "fedpax.folder": str(description.folder)},
            )
        else:
            run = client.get_run(id)
            client.set_terminated(id, "RUNNING")
        self.id = run.info.run_id
        known = run.data.params
        fields = {
            _mlflow_name(path): str(value)[:MLFLOW_LONGEST]
            for path, value in description.flat.items()
        }
        params = [Param(name, value) for name, value in fields.items() if name not in known]
        for first in range(0, len(params), MLFLOW_PARAMS):
            client.log_batch(self.id, params=params[first : first + MLFLOW_PARAMS])
        # MLflow's parameters cannot change, but a run can resume with others.
        changed = [
            RunTag(f"changed.{name}", value)
            for name, value in fields.items()
            if name in known and known[name] != value
        ]
        client.log_batch(self.id, tags=changed)
        address = mlflow.get_tracking_uri()
        path = f"#/experiments/{run.info.experiment_id}/runs/{self.id}"
        is_page = address.startswith("http")
        self.place = f"{address.rstrip('/')}/{path}" if is_page else f"run {self.id} in {address}"

    def log(self, entries: Sequence[TrackedLine]) -> None:
        """Send lines, at the time at which they were written."""
        metrics = [
            self._metric(_mlflow_name(name), value, int(entry.seconds * 1000), entry.line["round"])
            for entry in entries
            for name, value in metrics_of(entry.line).items()
        ]
        for first in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self.id, metrics=metrics[first : first + MLFLOW_BATCH])

    def log_checkpoint(self, folder: Path, round_number: int) -> None:
        """Send a checkpoint; the artifacts of a run are a run's folder with all of them."""
        del round_number
        self._client.log_artifacts(self.id, str(folder))

    def close(self, outcome: RunOutcome) -> None:
        """Record how the run ended."""
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self.id, status)


def _experiment_id(client: Any, name: str) -> Any:
    """Return the id of MLflow's experiment of a name, made if it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        with contextlib.suppress(Exception):  # another run has just made it
            return client.create_experiment(name)
        experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id


def _mlflow_name(name: str) -> str:
    """Replace the characters that a name in MLflow cannot have."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


class TrackioRun:
    """A run of trackio: on this machine, or at `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID`."""

    def __init__(self, id: str, description: Description) -> None:
        import trackio

        self._trackio, self.id = trackio, id
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        with _quiet():
            self._run: Any = trackio.init(
                project=project,
                name=id,  # trackio continues a run by its name
                config={"exp": description.exp, **description.flat},
                resume="allow",
                embed=False,
                auto_log_cpu=False,
            )
        self.place = f"trackio show --project {project}"

    def log(self, entries: Sequence[TrackedLine]) -> None:
        """Send lines."""
        for entry in entries:
            self._run.log(metrics_of(entry.line), step=entry.line["round"])

    def log_checkpoint(self, folder: Path, round_number: int) -> None:
        """Send a checkpoint as an artifact of type `model`."""
        artifact = self._trackio.Artifact(f"run-{self.id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[f"round-{round_number}"])

    def close(self, outcome: RunOutcome) -> None:
        """Wait until everything is written; trackio keeps no outcome."""
        del outcome
        with _quiet():
            self._run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard what trackio prints: the output of a command is the command's."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


SERVICES: dict[str, Callable[[Any, Description], TrackedRun]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
}
"""The trackers. A run that MLflow has not seen yet has the id None: the server chooses it."""

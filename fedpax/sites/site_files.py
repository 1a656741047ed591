"""The files of a site: a run's configuration and inputs, its name, models, and kept values."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.orbax_files import forget_place
from fedpax.errors import ArgumentError, ArgumentTypeError, DamagedStateError
from fedpax.files import explain_damage, read_json, replace_file
from fedpax.run_files.configuration import to_json, without_paths
from fedpax.run_files.metrics import MetricsWriter, select, with_quantiles
from fedpax.run_files.paths import CHECKPOINTS, write_atomically
from fedpax.sites.report_tables import ReportWatch
from fedpax.sites.site_experiment import SITE_FILE, Json
from fedpax.sites.site_table import SITES, SiteReport, SiteTable
from fedpax.sites.tasks import read_message, write_message
from fedpax.training.progress import Progress
from fedpax.transport.message import Message, MessageError


class SiteState(NamedTuple):
    """The content of a site's checkpoint: the model of the last round."""

    params: Params


class SiteFile(NamedTuple):
    """The content of `site.json`; `process` is a secret, by which the next process takes over."""

    run: str | None = None
    finished: bool = False
    process: str | None = None


def write_run(folder: Path, experiment: Any, exp: str, run: SiteFile) -> None:
    """Make a folder a run's, which `fedpax evaluate` and other commands read."""
    folder.mkdir(exist_ok=True)
    experiment.write_configuration(folder, exp)
    write_site_file(folder, run)


def write_site_file(folder: Path, run: SiteFile) -> None:
    """Write `site.json`, for this user alone."""
    replace_file(folder / SITE_FILE, (json.dumps(run._asdict()) + "\n").encode(), mode=0o600)


def save_model(folder: Path, round_number: int, params: Params, experiment: Any) -> None:
    """Save the model of a round."""
    with Checkpoints(folder, keep=experiment.training.keep_checkpoints) as checkpoints:
        state = SiteState(jax.device_get(params))
        checkpoints.save(round_number, state, {}, to_json(without_paths(experiment)))
        checkpoints.wait()
    forget_place(folder / CHECKPOINTS / str(round_number))


def read_run(folder: Path) -> SiteFile:
    """Read `site.json` of a site's folder; no run in a new folder."""
    path = folder / SITE_FILE
    if not path.exists():
        return SiteFile()
    expectation = (
        "expected the file that `fedpax join` writes. Restore it from a copy, or give an empty "
        "--job_log_dir."
    )
    with explain_damage(path, expectation):
        run = SiteFile(**read_json(path))
        if not isinstance(run.run, str | None) or not isinstance(run.process, str | None):
            raise ArgumentTypeError(f"run is {run.run!r}, and process is {run.process!r}")
    return run


# ---- what a site's clients keep between rounds, on the site's disk

Values = Mapping[str, np.ndarray]


class KeptValues:
    """The states of a site's clients, such as SCAFFOLD's controls, by the client's name.

    New states count once the coordinator has counted their round. Those of absent clients stay.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "kept"
        self._known: dict[str, Values] = {}

    def read(self, client: str) -> Values:
        """Return the states of a client; empty before its first round that counts."""
        if client not in self._known:
            path = self._path(client)
            self._known[client] = self._load(path).arrays if path.exists() else {}
        return self._known[client]

    def propose(self, token: str, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Write new states of clients, made in the round of a token: before the reply is sent."""
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("*.new"):
            path.unlink()
        for client, values in states.items():
            arrays = {name: np.asarray(x) for name, x in values.items()}
            new = self._path(client).with_suffix(".new")
            write_message(new, Message({"token": token}, arrays))

    def settle(self, counted: str | None, current: str) -> None:
        """Take over the counted round's proposals, and remove others but the current round's."""
        for path in sorted(self._folder.glob("*.new")):
            token = self._load(path).header["token"]
            if token == current:
                continue
            if token == counted:
                path.replace(path.with_suffix(".state"))
                self._known.clear()
            else:
                path.unlink()

    def _path(self, client: str) -> Path:
        return self._folder / f"{hash_name(client)}.state"

    def _load(self, path: Path) -> Message:
        try:
            return read_message(path)
        except MessageError as error:
            raise DamagedStateError(
                f"{path} is damaged: {error} Or delete it: the client then begins from its initial "
                "state."
            ) from error


def hash_name(client: str) -> str:
    """Return the name of a client's file: client names can be paths, or hold any character."""
    return hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_names(names: Sequence[str], count: int) -> None:
    """Raise unless each client of a site has its own name."""
    repeated = sorted(name for name, times in Counter(names).items() if times > 1)
    if repeated or len(names) != count:
        what = f"{repeated[0]!r} names several clients" if repeated else f"{len(names)} names"
        raise ArgumentError(
            f"{what} of this site, expected a name for each of its {count} clients: states are "
            "kept by name. Give files, or the values of --data.client, different names."
        )


# ---- the files of a coordinator beside its checkpoints: the federation, the sites, the metrics

FEDERATION = "federation.json"
"""The run's name, the shared inputs and the sites, in the coordinator's folder."""


def read_federation(folder: Path) -> dict[str, Any] | None:
    """Read `federation.json` of a coordinator's folder; None without the file."""
    path = folder / FEDERATION
    if not path.exists():
        return None
    expectation = "expected the file that `fedpax syncer` writes. Restore it from a copy."
    with explain_damage(path, expectation):
        content: dict[str, Any] = read_json(path)
        _ = content["run"], content["inputs"], content["sites"]
    return content


def write_federation(folder: Path, exchange: Any, inputs: Json | None) -> None:
    """Write `federation.json`, from what a `TaskExchange` has."""
    agreed, sites = exchange.agreed, exchange.sites.to_json()
    content = {"run": exchange.run, "inputs": inputs, "agreed": agreed, "sites": sites}
    content["opened"] = exchange.opened
    write_atomically(folder / FEDERATION, json.dumps(content, ensure_ascii=False) + "\n")


class SiteWatch:
    """A reporter of changes in the sites' states, with `sites.json`."""

    def __init__(self, folder: Path, progress: Progress, sites: SiteTable) -> None:
        self._progress, self._sites = progress, sites
        self._watch = ReportWatch[SiteReport](folder / SITES, progress)
        self._rivals: set[str] = set()  # names of which a second process was told

    def update(self, *, force: bool = False) -> None:
        """Report the changes since the last call, and write the table."""
        self._watch.update(self._sites.reports(time.monotonic()), force=force)
        for name in sorted({site.name for site in self._sites if site.has_rival} - self._rivals):
            self._rivals.add(name)
            self._progress.note(
                f"another process calls itself {name}. {self._sites.advise_rival()}"
            )


class RoundMetrics:
    """A writer of a line of metrics for each round over sites."""

    def __init__(self, metrics: MetricsWriter, progress: Progress) -> None:
        self._metrics, self._progress = metrics, progress
        last = (select(metrics.kept, "training") or [{}])[-1]
        self._started = time.perf_counter() - (last.get("wall_seconds") or 0.0)
        self._bytes = last.get("bytes_across_placement") or 0.0
        self._items = last.get("items") or 0

    def add(
        self,
        number: int,
        metrics: Mapping[str, Any],
        *,
        sites: int,
        items: int,
        sent_bytes: int,
        received_bytes: int,
        seconds: float,
    ) -> None:
        """Write the line of a round, and show it."""
        values = {k: float(np.asarray(v)) for k, v in with_quantiles(metrics).items()}
        self._bytes += sent_bytes + received_bytes
        self._items += items
        self._metrics.write(
            "training",
            number,
            {
                **values,
                "sites": sites,
                "sent_bytes": sent_bytes,
                "received_bytes": received_bytes,
                "items": self._items,
                "bytes_across_placement": self._bytes,
                "seconds": seconds,
                "items_per_second": items / seconds,
                "wall_seconds": time.perf_counter() - self._started,
            },
        )
        self._progress.show_round(number, values.get("loss", math.nan), items / seconds)

    def add_evaluation(
        self, number: int, mean: Mapping[str, float], by_site: Mapping[str, float], source: str
    ) -> None:
        """Write the metrics on held-out examples: their mean, and by site."""
        seconds = {"wall_seconds": time.perf_counter() - self._started}
        self._metrics.write("evaluation", number, {**mean, **by_site, **seconds})
        self._progress.show_evaluation(number, mean, source)

"""The files of a site: a run's configuration and inputs, its name, and models."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.errors import ArgumentTypeError
from fedpax.files import explain_damage, read_json
from fedpax.run_files.configuration import to_json, write_configuration
from fedpax.run_files.paths import write_atomically
from fedpax.sites.contract import SITE_FILE


class SiteState(NamedTuple):
    """The content of a site's checkpoint: the model of the last round."""

    params: Params


class SiteFile(NamedTuple):
    """The content of `site.json`.

    Attributes:
        run: the run's name. Default None: no coordinator has taken the site yet.
        finished: whether the site has its last model.
        process: the secret name of the last process that joined. The next one in this folder
            proves by it that it may take over at once.
    """

    run: str | None = None
    finished: bool = False
    process: str | None = None


def write_run(folder: Path, experiment: Any, exp: str, run: SiteFile) -> None:
    """Make a folder a run's, which `fedpax evaluate` and other commands read."""
    folder.mkdir(exist_ok=True)
    write_configuration(folder, experiment, exp)
    experiment.write_inputs(folder)
    write_site_file(folder, run)


def write_site_file(folder: Path, run: SiteFile) -> None:
    """Write `site.json`."""
    write_atomically(folder / SITE_FILE, json.dumps(run._asdict()) + "\n")


def save_model(folder: Path, round_number: int, params: Params, experiment: Any) -> None:
    """Save the model of a round."""
    with Checkpoints(folder, keep=experiment.training.keep_checkpoints) as checkpoints:
        state = SiteState(jax.device_get(params))
        checkpoints.save(round_number, state, {}, to_json(experiment))
        checkpoints.wait()


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

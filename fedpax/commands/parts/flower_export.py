"""The Flower app of an experiment, for `fedpax export --flower`."""

import dataclasses
from pathlib import Path

from fedpax.commands.parts.saved_run import build_run
from fedpax.deploy.flower.app_files import PACKAGE, write_app
from fedpax.deploy.round_program import pack_experiment, parse_program
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.training.experiment import Experiment

_HELDOUT = '''\
"""The held-out data of a participant."""

from pathlib import Path

from fedpax.experiments.node_data import heldout_data


def load_data(node):
    """Return the held-out examples of participant `node.participant`."""
    return heldout_data(Path(__file__).parent, node)
'''


def write_flower_app(folder: Path, experiment: Experiment, exp: str) -> str:
    """Write the app of an experiment to a new folder; return what it is in words."""
    experiment = _with_absolute_files(experiment)
    run = build_run(experiment)
    text = pack_experiment(experiment, run)
    program = parse_program(text)
    write_app(
        folder,
        name=exp,
        program=text,
        settings=program.settings,
        size=program.size,
        participants=run.placement,
    )
    experiment.write_configuration(folder / PACKAGE, exp)
    return (
        f"a Flower app for {program.size} of {program.settings.num_clients} {run.placement}, "
        f"program {program.program[:12]}"
    )


def write_heldout_data(experiment: Experiment, exp: str, folder: Path) -> None:
    """Write the files by which a node of an evaluation reads its held-out examples."""
    experiment = _with_absolute_files(experiment)
    (folder / "data.py").write_text(_HELDOUT, encoding="utf-8")
    experiment.write_configuration(folder, exp)


def _with_absolute_files(experiment: Experiment) -> Experiment:
    """Return an experiment for an app, which Flower copies: relative paths would lead nowhere."""
    if not isinstance(experiment, FedAvgFiles):
        return experiment
    inputs, data = experiment.saved_inputs, experiment.data
    files = tuple(p if "://" in p else str(Path(p).expanduser().absolute()) for p in data.files)
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(data, files=files))
    experiment.__dict__["_saved_inputs"] = inputs
    return experiment

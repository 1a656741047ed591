"""The Flower app of an experiment, for `fedpax export --flower`."""

import dataclasses
from pathlib import Path

from fedpax.commands.parts.saved_run import build_run
from fedpax.deploy.experiment_program import pack_experiment
from fedpax.deploy.flower_files import PACKAGE, write_app
from fedpax.deploy.round_program import parse_program
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.run_files.configuration import write_configuration
from fedpax.training.experiment import Experiment


def write_flower_app(folder: Path, experiment: Experiment, exp: str) -> str:
    """Write the app of an experiment to a new folder; return what it is in words."""
    # Flower copies the app: relative paths would lead nowhere.
    if isinstance(experiment, FedAvgFiles):
        inputs = experiment.saved_inputs
        data = experiment.data
        files = tuple(p if "://" in p else str(Path(p).expanduser().absolute()) for p in data.files)
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(data, files=files))
        experiment.__dict__["_saved_inputs"] = inputs
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
    write_configuration(folder / PACKAGE, experiment, exp)
    experiment.write_inputs(folder / PACKAGE)
    return (
        f"a Flower app for {program.size} of {program.settings.num_clients} {run.placement}, "
        f"program {program.program[:12]}"
    )

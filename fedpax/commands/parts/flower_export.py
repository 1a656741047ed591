"""The Flower app of an experiment, for `fedpax export --flower`."""

import dataclasses
from pathlib import Path

import jax

from fedpax.commands.parts.saved_run import build_run
from fedpax.data import CohortRounds
from fedpax.deploy.flower_files import PACKAGE, write_app
from fedpax.deploy.round_program import Settings, pack_program, parse_program
from fedpax.errors import UsageError
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
    if run.frozen is not None or run.initial is not None or run.cohort_shapes is None:
        obstacle = (
            "states no cohort_shapes"
            if run.cohort_shapes is None
            else "begins from parameters in a folder"
        )
        raise UsageError(
            f"{exp} {obstacle}, expected a run that begins from new parameters, with cohorts of "
            "known shapes. In Python, fedpax.deploy.round_program.pack_program takes any algorithm."
        )
    training = experiment.training
    settings = Settings(rounds=training.rounds, seed=training.seed)
    if isinstance(run.cohorts, CohortRounds):
        drawn = run.cohorts.settings
        settings = settings._replace(
            num_clients=run.cohorts.num_clients,
            local_epochs=int(drawn["local_epochs"]),
            cohort_seed=int(drawn["seed"]),
        )
    else:
        settings = settings._replace(num_clients=jax.tree.leaves(run.cohort_shapes)[0].shape[0])
    text = pack_program(run.algorithm, run.init, run.cohort_shapes, settings)
    program = parse_program(text)
    write_app(
        folder,
        name=exp,
        program=text,
        settings=settings,
        size=program.size,
        participants=run.placement,
    )
    write_configuration(folder / PACKAGE, experiment, exp)
    experiment.write_inputs(folder / PACKAGE)
    return (
        f"a Flower app for {program.size} of {settings.num_clients} {run.placement}, "
        f"program {program.program[:12]}"
    )

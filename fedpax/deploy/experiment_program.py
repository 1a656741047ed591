"""The program of an experiment, for engines whose participants have data of their own."""

import hashlib
import json
import os
from pathlib import Path

import jax

import fedpax
from fedpax.data import CohortRounds
from fedpax.deploy.round_program import Settings, pack_program
from fedpax.errors import ArgumentError
from fedpax.run_files.configuration import class_name, to_json
from fedpax.training.experiment import Experiment, Run


def pack_experiment(experiment: Experiment, run: Run) -> str:
    """Export the round of an experiment as the text of a program (`pack_program`)."""
    if run.frozen is not None or run.initial is not None or run.cohort_shapes is None:
        obstacle = (
            "states no cohort_shapes"
            if run.cohort_shapes is None
            else "begins from parameters in a folder"
        )
        raise ArgumentError(
            f"{class_name(experiment)} {obstacle}, expected a run that begins from new parameters, "
            "with cohorts of known shapes. fedpax.deploy.round_program.pack_program takes any "
            "algorithm."
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
    return pack_program(run.algorithm, run.init, run.cohort_shapes, settings)


def program_file(experiment: Experiment, folder: Path) -> Path:
    """Return the file of an experiment's program, which is exported if the folder has none."""
    content = json.dumps([to_json(experiment), fedpax.__version__, jax.__version__], sort_keys=True)
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(pack_experiment(experiment, experiment.build()), encoding="utf-8")
        draft.replace(path)
    return path

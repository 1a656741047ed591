"""The run of an experiment whose method is divided into parts, as syncer and islands build it."""

import dataclasses

from fedpax.algorithm import AlgorithmParts
from fedpax.errors import ConfigurationError
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.begin_from import begin_from
from fedpax.training.experiment import Experiment, Run


def build_parts(experiment: Experiment, mesh: MeshConfig, exp: str = "") -> Run:
    """Build an experiment on a site's own mesh; raise if its method has no parts."""
    run = dataclasses.replace(experiment, mesh=mesh).build()
    if run.algorithm.parts is None:
        raise ConfigurationError(
            f"--exp={exp or type(experiment).__name__} runs as one program only, expected an "
            "experiment whose algorithm has parts. Use one of Decoupled DiLoCo, such as "
            "--exp=decoupled_diloco_text, or set FederatedAlgorithm.parts."
        )
    training = experiment.training
    if training.keep_best is not None or training.stop_after:
        raise ConfigurationError(
            f"training.keep_best={training.keep_best}, training.stop_after={training.stop_after}: "
            "they have no effect on islands with runtimes of their own, expected None and 0. Leave "
            "them out, and compare the evaluations in the metrics.jsonl of the islands."
        )
    return begin_from(run, training.begin_from)


def parts_of(run: Run) -> AlgorithmParts:
    """Return the parts of a run of `build_parts`."""
    assert run.algorithm.parts is not None
    return run.algorithm.parts


def tokens_per_step(run: Run, parts: AlgorithmParts, num_fragments: int) -> float:
    """Return the tokens of an inner step of one island."""
    return run.items_per_round / parts.islands / (parts.steps_per_sync * num_fragments)

"""Compare the state of an experiment with that in a run's newest checkpoint."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from fedpax.checkpoints.participant_states import check_resizable
from fedpax.checkpoints.saved_state import check_same_leaves, has_saved_shape, saved_shapes
from fedpax.run_files.paths import CHECKPOINTS, latest_round, resolve_folder
from fedpax.training.experiment import Experiment


def describe_state_misfit(saved_in: Path, experiment: Experiment) -> str | None:
    """Describe why an experiment cannot resume from a run's newest checkpoint, whatever is allowed.

    The leaves and their shapes are compared. Nothing is compiled, and no array is read.

    Args:
        saved_in: the folder of the run's checkpoints.
        experiment: the experiment.

    Returns:
        The difference and the remedy. None if the states fit, if there is no checkpoint, or if the
        experiment cannot be built here.
    """
    try:
        step = latest_round(saved_in)
        if step is None:
            return None
        saved = saved_shapes(resolve_folder(saved_in) / CHECKPOINTS, step)
        run = experiment.build()
        with jax.set_mesh(run.mesh):
            params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
            state = jax.eval_shape(run.algorithm.init, params)
    except Exception:  # training reports it, if it is still there when the values are allowed
        return None
    wanted = ocp.tree.to_flat_dict(state)
    try:
        check_same_leaves(wanted, saved, step)
        for path, leaf in wanted.items():
            # The first axis of any leaf but the model's can be the participants'.
            participants = leaf.shape[0] if leaf.shape else None
            if not has_saved_shape(leaf, saved[path], path, participants):
                check_resizable(state, saved[path][0], leaf.shape[0])
    except ValueError as error:
        return str(error)
    return None

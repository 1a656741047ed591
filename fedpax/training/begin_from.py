"""A run that begins from the model of another run."""

import jax

from fedpax.algorithm import Params
from fedpax.checkpoints.saved_state import load_params
from fedpax.errors import ConfigurationError
from fedpax.training.compiled_round import with_shardings
from fedpax.training.experiment import Run, StoredParams


def begin_from(run: Run, job_log_dir: str | None) -> Run:
    """Give a run the model of another run as its initial parameters."""
    # The method begins anew: optimizer, schedule and position in the data are a new run's.
    if job_log_dir is None:
        return run
    source = f"training.begin_from={job_log_dir}"
    if run.initial is not None:
        raise ConfigurationError(
            f"{source} and {run.initial.source} are given, expected one of them: both are initial "
            "parameters. Leave one out."
        )
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    like = with_shardings(shapes, run.resolved_shardings.params)

    def load() -> Params:
        try:
            return load_params(job_log_dir, like=like)
        except (FileNotFoundError, ValueError) as error:
            raise ConfigurationError(f"{source}: {error}") from error

    return run._replace(initial=StoredParams(source, like, load))

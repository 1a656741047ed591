"""Training: experiments, the loop that trains them, and evaluation.

- Experiments: an `Experiment` is a configuration, with a `TrainingConfig`, whose `build` returns a
  `Run`: the algorithm, the data, the evaluation, the mesh and the `Shardings`. `StoredParams` and
  `with_frozen_argument` begin from, or train beside, parameters that are read from a folder.
- Training: `train` trains an experiment in a folder (`fedpax.train` is its short form for scripts
  and notebooks) and returns a `TrainingResult`. `read_metrics` reads what it has logged.
- Evaluation: `evaluator` and `placed_evaluator` make `Run.evaluate`; `evaluate_by_client` has a
  value of each metric for each client.
- Metrics of methods: `with_exchanged_bytes`, and for simulated time `TimedSchedule`,
  `ScheduledRounds` and `with_virtual_seconds`.
"""

from fedpax.run_files.metrics import read_metrics
from fedpax.training.evaluation import evaluate_by_client, evaluator, placed_evaluator
from fedpax.training.exchanged_bytes import with_exchanged_bytes
from fedpax.training.experiment import (
    Experiment,
    HeldoutMetrics,
    Run,
    Shardings,
    TrainingConfig,
)
from fedpax.training.logging import NonFiniteError
from fedpax.training.spikes import RepeatedSpikesError
from fedpax.training.stored_params import StoredParams, with_frozen_argument
from fedpax.training.trainer import StorageError, TrainingResult, train
from fedpax.training.virtual_time import ScheduledRounds, TimedSchedule, with_virtual_seconds

__all__ = [
    "Experiment",
    "HeldoutMetrics",
    "NonFiniteError",
    "RepeatedSpikesError",
    "Run",
    "ScheduledRounds",
    "Shardings",
    "StorageError",
    "StoredParams",
    "TimedSchedule",
    "TrainingConfig",
    "TrainingResult",
    "evaluate_by_client",
    "evaluator",
    "placed_evaluator",
    "read_metrics",
    "train",
    "with_exchanged_bytes",
    "with_frozen_argument",
    "with_virtual_seconds",
]

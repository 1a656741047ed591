"""Training: experiments, the loop that trains them, and evaluation.

- Experiments: an `Experiment` is a configuration, with a `TrainingConfig`, whose `build` returns a
  `Run`: the algorithm, the data, the evaluation, the mesh and the `Shardings`. `StoredParams` and
  `with_frozen_argument` begin from, or train beside, parameters that are read from a folder.
- Training: `train` trains an experiment in a folder (`fedpax.train` is its short form for scripts
  and notebooks) and returns a `TrainingResult`. `read_metrics` reads the log of a
  run, and `select` chooses lines of it.
- Evaluation: `evaluator` and `placed_evaluator` make `Run.evaluate`; `evaluate_by_client` has a
  value of each metric for each client, as have `ClientMetrics`, which `Run.evaluate_clients`
  returns.
- Metrics of methods: `with_exchanged_bytes`, and for simulated time `TimedSchedule`,
  `ScheduledRounds` and `with_virtual_seconds`.
"""

from fedpax.lazy_names import lazy_names

_MODULES = {
    "ClientMetrics": "fedpax.training.client_metrics",
    "Experiment": "fedpax.training.experiment",
    "GoodputClock": "fedpax.run_files.goodput",
    "HeldoutMetrics": "fedpax.training.experiment",
    "NonFiniteError": "fedpax.training.logging",
    "RepeatedSpikesError": "fedpax.training.spikes",
    "Run": "fedpax.training.experiment",
    "ScheduledRounds": "fedpax.training.virtual_time",
    "Shardings": "fedpax.training.experiment",
    "StorageError": "fedpax.training.trainer",
    "StoredParams": "fedpax.training.experiment",
    "TimedSchedule": "fedpax.training.virtual_time",
    "TrainingConfig": "fedpax.training.training_config",
    "TrainingResult": "fedpax.training.trainer",
    "evaluate_by_client": "fedpax.training.evaluation",
    "evaluator": "fedpax.training.evaluation",
    "placed_evaluator": "fedpax.training.evaluation",
    "read_configuration": "fedpax.run_files.configuration",
    "read_metrics": "fedpax.run_files.metrics",
    "select": "fedpax.run_files.metrics",
    "train": "fedpax.training.trainer",
    "with_exchanged_bytes": "fedpax.training.virtual_time",
    "with_frozen_argument": "fedpax.training.experiment",
    "with_seed": "fedpax.run_files.configuration",
    "with_virtual_seconds": "fedpax.training.virtual_time",
    "write_configuration": "fedpax.run_files.configuration",
}
__all__ = list(_MODULES)
# Commands that do not train need not load the models.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)

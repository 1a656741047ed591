"""Training: experiments, the loop that trains them, and evaluation.

- Experiments: an `Experiment` is a configuration, with a `TrainingConfig`, whose `build` returns a
  `Run`, with its `Shardings`. `StoredParams` and `with_frozen_argument` are for parameters from a
  folder.
- Training: `train` (short form: `fedpax.train`) returns a `TrainingResult`. `read_metrics` and
  `select` read its log.
- Evaluation: `evaluator` and `placed_evaluator` make `Run.evaluate`; `evaluate_by_client` makes
  `ClientMetrics`.
- Metrics of methods: `with_exchanged_bytes`, and for simulated time `TimedSchedule`,
  `ScheduledRounds` and `with_virtual_seconds`.
"""

from fedpax.lazy_names import lazy_names

# Commands that do not train need not load the models.
__all__, __getattr__, __dir__ = lazy_names(__name__)

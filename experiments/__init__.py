"""Experiments: zero-argument functions, each returns a configuration that can be trained.

The names of this package are for experiments of your own.
"""

from fedpax.lazy_names import lazy_names

# The list of experiments needs no models.
__all__, __getattr__, __dir__ = lazy_names(__name__)

FORMER_MODULES = {
    "asynchronous_text": "fedpax.experiments.async_diloco_text",
    "client_aggregators": "fedpax.settings.client_aggregators",
    "client_files": "fedpax.settings.table_data",
    "client_methods": "fedpax.settings.client_methods",
    "cohort_settings": "fedpax.settings.cohort_settings",
    "fedavg_clients": "fedpax.experiments.client_experiment",
    "language_model": "fedpax.experiments.language_model_experiment",
    "optimizer_settings": "fedpax.settings.optimizer_settings",
    "optimizers": "fedpax.settings.optimizer_settings",
    "personal_methods": "fedpax.settings.client_methods",
    "populations": "fedpax.settings.cohort_settings",
    "robust_aggregators": "fedpax.settings.client_aggregators",
    "table_data": "fedpax.settings.table_data",
    "text": "fedpax.experiments.text_experiment",
    "trace_settings": "fedpax.settings.trace_settings",
    "traces": "fedpax.settings.trace_settings",
}
"""Former modules of this package, which `config.json` of older runs names."""

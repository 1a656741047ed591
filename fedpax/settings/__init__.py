"""Settings: methods, aggregators, optimizers, cohorts, traces and users' files as configuration.

Classes for experiments of your own are names of `fedpax.experiments`.
"""

FORMER_MODULES = {"client_files": "fedpax.settings.table_data"}
"""Former modules of this package, which `config.json` of older runs names."""

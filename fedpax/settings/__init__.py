"""Settings: methods, aggregators, optimizers, cohorts, traces and users' files as configuration.

Each field becomes a flag of the command line. The classes that experiments of your own use are
names of `fedpax.experiments`.
"""

FORMER_MODULES = {"client_files": "fedpax.settings.table_data"}
"""Former modules of this package, which `config.json` of older runs names."""

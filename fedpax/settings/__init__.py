"""Settings: methods, aggregators, optimizers, cohorts, traces and users' files as configuration.

Each field becomes a flag of the command line. The classes that experiments of your own use are
names of `fedpax.experiments`.
"""

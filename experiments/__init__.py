"""Experiments: zero-argument functions, each returns a configuration that can be trained.

`fedpax list` names them, and `find_experiment("fedavg_digits")` returns one. The names of this
package are for experiments of your own: base classes, and fields for a method or an aggregator.
"""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.experiments.catalog import ExperimentGroup as ExperimentGroup
    from fedpax.experiments.catalog import UnknownExperimentError as UnknownExperimentError
    from fedpax.experiments.catalog import experiments as experiments
    from fedpax.experiments.catalog import find_experiment as find_experiment
    from fedpax.experiments.catalog import find_group as find_group
    from fedpax.experiments.client_experiment import ClientExperiment as ClientExperiment
    from fedpax.experiments.diloco_text import DiLoCoText as DiLoCoText
    from fedpax.experiments.fedavg_image_files import FedAvgImageFiles as FedAvgImageFiles
    from fedpax.experiments.fedavg_images import FedAvgImages as FedAvgImages
    from fedpax.experiments.fedavg_table import FedAvgTable as FedAvgTable
    from fedpax.settings.client_aggregators import AggregatorConfig as AggregatorConfig
    from fedpax.settings.client_aggregators import aggregator as aggregator
    from fedpax.settings.client_methods import ClientTraining as ClientTraining
    from fedpax.settings.client_methods import MethodConfig as MethodConfig
    from fedpax.settings.client_methods import method as method
    from fedpax.settings.cohort_settings import CohortConfig as CohortConfig
    from fedpax.settings.cohort_settings import DirichletPopulation as DirichletPopulation
    from fedpax.settings.cohort_settings import NaturalPopulation as NaturalPopulation
    from fedpax.settings.cohort_settings import PopulationConfig as PopulationConfig
    from fedpax.settings.cohort_settings import ServerConfig as ServerConfig
    from fedpax.settings.cohort_settings import SyntheticPopulation as SyntheticPopulation

_NAMES = {
    "fedpax.experiments.catalog": (
        "ExperimentGroup UnknownExperimentError experiments find_experiment find_group"
    ),
    "fedpax.settings.client_aggregators": "AggregatorConfig aggregator",
    "fedpax.experiments.client_experiment": "ClientExperiment",
    "fedpax.settings.client_methods": "ClientTraining MethodConfig method",
    "fedpax.settings.cohort_settings": (
        "CohortConfig DirichletPopulation NaturalPopulation PopulationConfig ServerConfig "
        "SyntheticPopulation"
    ),
    "fedpax.experiments.diloco_text": "DiLoCoText",
    "fedpax.experiments.fedavg_image_files": "FedAvgImageFiles",
    "fedpax.experiments.fedavg_images": "FedAvgImages",
    "fedpax.experiments.fedavg_table": "FedAvgTable",
}
# The list of experiments needs no models.
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)

FORMER_MODULES = {
    "asynchronous_text": "fedpax.experiments.async_diloco_text",
    "client_aggregators": "fedpax.settings.client_aggregators",
    "client_files": "fedpax.settings.client_files",
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

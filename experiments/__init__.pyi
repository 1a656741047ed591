"""The public names of experiments, for type checkers and `fedpax.lazy_names`."""

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

FORMER_MODULES: dict[str, str]

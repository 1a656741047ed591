"""The public names of training, for type checkers and `fedpax.lazy_names`."""

from fedpax.data.rounds.scheduled_rounds import ScheduledRounds as ScheduledRounds
from fedpax.run_files.configuration import read_configuration as read_configuration
from fedpax.run_files.configuration import with_seed as with_seed
from fedpax.run_files.configuration import write_configuration as write_configuration
from fedpax.run_files.goodput import GoodputClock as GoodputClock
from fedpax.run_files.metrics import read_metrics as read_metrics
from fedpax.run_files.metrics import select as select
from fedpax.training.client_metrics import ClientMetrics as ClientMetrics
from fedpax.training.evaluation import evaluate_by_client as evaluate_by_client
from fedpax.training.evaluation import evaluator as evaluator
from fedpax.training.evaluation import placed_evaluator as placed_evaluator
from fedpax.training.exchanged_bytes import with_exchanged_bytes as with_exchanged_bytes
from fedpax.training.experiment import Experiment as Experiment
from fedpax.training.experiment import HeldoutMetrics as HeldoutMetrics
from fedpax.training.experiment import Run as Run
from fedpax.training.experiment import Shardings as Shardings
from fedpax.training.experiment import StoredParams as StoredParams
from fedpax.training.experiment import with_frozen_argument as with_frozen_argument
from fedpax.training.round_logger import NonFiniteError as NonFiniteError
from fedpax.training.spikes import RepeatedSpikesError as RepeatedSpikesError
from fedpax.training.trainer import StorageError as StorageError
from fedpax.training.trainer import TrainingResult as TrainingResult
from fedpax.training.trainer import train as train
from fedpax.training.training_config import TrainingConfig as TrainingConfig
from fedpax.training.virtual_time import TimedSchedule as TimedSchedule
from fedpax.training.virtual_time import with_virtual_seconds as with_virtual_seconds

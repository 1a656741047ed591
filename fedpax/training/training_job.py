"""A run to train, where, and what may have changed since it was saved."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from fedpax.checkpoints.participant_states import ParticipantRule
from fedpax.elastic.membership import Membership
from fedpax.training.experiment import Experiment
from fedpax.training.folder_owners import CheckpointDir


class ResumeOptions(NamedTuple):
    """Allowed changes since the folder's checkpoint was saved."""

    allow_config_change: Collection[str]  # paths of fields of the configuration
    participant_states: ParticipantRule  # how to make states for another number of participants
    # the part of this process in an elastic job; None: there is no such job
    membership: Membership | None = None


class TrainingJob(NamedTuple):
    """A run to train, and where."""

    experiment: Experiment
    folder: Path  # the run's folder
    saved_in: Path
    checkpoint_dir: CheckpointDir | None  # `saved_in`, if it is not the run's folder
    exp: str
    options: ResumeOptions

    @property
    def name(self) -> str:
        """The name of the experiment, for messages."""
        return self.exp or type(self.experiment).__name__

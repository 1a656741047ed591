"""Opens a folder of checkpoints with Orbax."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from fedpax.checkpoints.literal_path import literal_path
from fedpax.checkpoints.saved_rounds import complete_rounds
from fedpax.run_files.configuration import ConfigurationError


def open_checkpoints(folder: Path, **settings: Any) -> ocp.CheckpointManager:
    """Open the folder of a run's checkpoints.

    Orbax then reads the time of each checkpoint, from a file that has no checksum.

    Args:
        folder: the run's `checkpoints` folder.
        **settings: the arguments of `ocp.CheckpointManager`.

    Raises:
        ConfigurationError: the time of a checkpoint is damaged.
    """
    try:
        return ocp.CheckpointManager(literal_path(folder), **settings)
    except ValueError as error:
        names = ocp.path.step.standard_name_format()
        for step in complete_rounds(folder):
            try:
                _ = names.find_step(folder, step).commit_timestamp
            except ValueError as reason:
                raise ConfigurationError(
                    f"{folder / str(step) / '_CHECKPOINT_METADATA'} is damaged ({reason}), "
                    "expected the file as it was saved. Restore it from a copy, or delete this "
                    "file alone: it holds the time of the checkpoint, which can be read without it."
                ) from error
        raise

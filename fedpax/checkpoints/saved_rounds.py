"""The rounds of a run's complete checkpoints, and damaged and unfinished ones, by their files."""

from pathlib import Path

from fedpax.checkpoints.checksums import find_damage, has_checksums
from fedpax.checkpoints.mounts import COMMITTED, is_object_store, remove_folder
from fedpax.checkpoints.remote import resolve_folder
from fedpax.console import print_error
from fedpax.errors import FedpaxError

FOLDER = "checkpoints"
DELETED = "deleted"
"""The folder in it to which a checkpoint is moved before its files are removed."""


class DamagedCheckpointError(FedpaxError, OSError):
    """A checkpoint whose files have changed since they were saved; the message names the remedy."""


def complete_rounds(folder: Path) -> list[int]:
    """Return the rounds of the complete checkpoints in a folder, in increasing order.

    Args:
        folder: a run's `checkpoints` folder, which may be missing.
    """
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in steps if has_checksums(path))


def rounds_without_checksums(folder: Path) -> list[int]:
    """Return the rounds of the checkpoints in a folder that are unfinished or incomplete.

    Args:
        folder: a run's `checkpoints` folder, which may be missing.
    """
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(int(path.name) for path in steps if not has_checksums(path))


def latest_round(job_log_dir: str | Path) -> int | None:
    """Return the round of the newest complete checkpoint of a run, or None if there is none.

    Args:
        job_log_dir: a run's folder, or one in a bucket. It may be missing.

    Example:
        >>> import tempfile
        >>> print(latest_round(tempfile.mkdtemp()))
        None
    """
    rounds = complete_rounds(resolve_folder(job_log_dir) / FOLDER)
    return rounds[-1] if rounds else None


def check_latest_round(job_log_dir: str | Path) -> None:
    """Compare the newest complete checkpoint of a run with its checksums.

    Args:
        job_log_dir: a run's folder.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged.
    """
    folder = resolve_folder(job_log_dir) / FOLDER
    for step in complete_rounds(folder)[-1:]:
        if damage := find_damage(folder / str(step)):
            raise damaged_checkpoint(folder, step, damage)


def damaged_checkpoint(folder: Path, step: int, damage: str) -> DamagedCheckpointError:
    """Make the error for a damaged checkpoint, which names the newest undamaged one before it."""
    delete = [str(folder / str(step))]
    before = None
    for number in reversed(complete_rounds(folder)):
        if number < step:
            try:
                is_whole = find_damage(folder / str(number)) is None
            except OSError:
                break  # such as a missing permission: its state is unknown
            if is_whole:
                before = number
                break
            delete.append(str(folder / str(number)))
    remedy = (
        f"delete {' and '.join(delete)} to resume from the checkpoint of round {before}"
        if before is not None
        else f"delete {' and '.join(delete)} to start again, since no earlier checkpoint is whole"
    )
    return DamagedCheckpointError(
        f"The checkpoint of round {step} is damaged: {damage}, expected the files as they were "
        f"saved. Restore them from a copy, or {remedy}."
    )


def set_aside_unfinished(folder: Path) -> None:
    """Remove unfinished and half deleted checkpoints, and rename those without checksums.

    Args:
        folder: a run's `checkpoints` folder, which may be missing.
    """
    if not folder.is_dir():
        return
    remove_deleted(folder)
    for path in folder.iterdir():
        if not path.name.isdecimal() or not path.is_dir() or has_checksums(path):
            continue
        unfinished = is_object_store(path) and not (path / COMMITTED).is_file()
        if unfinished or not any(entry.is_file() for entry in path.rglob("*")):
            remove_folder(path)
            print_error(f"Removed {path}: the checkpoint is unfinished.")
            continue
        aside = _set_aside(path, "without_checksums")
        print_error(
            f"Moved {path} to {aside}: the checkpoint is unfinished or incomplete, it has no "
            "checksums.json. If a copy left that file out, copy it back."
        )


def remove_deleted(folder: Path) -> None:
    """Remove what is left of deleted checkpoints, which a kill can have interrupted.

    Args:
        folder: a run's `checkpoints` folder.

    Raises:
        OSError: the files cannot be removed.
    """
    if not is_object_store(folder) and (folder / DELETED).is_dir():
        remove_folder(folder / DELETED)


def set_aside_after(folder: Path, round_number: int) -> None:
    """Rename the complete checkpoints of later rounds, which a run trains again.

    Args:
        folder: a run's `checkpoints` folder, which may be missing.
        round_number: the round from which the run resumes.
    """
    for step in complete_rounds(folder):
        if step > round_number:
            aside = _set_aside(folder / str(step), f"before_round_{round_number}_resumed")
            print_error(
                f"Moved {folder / str(step)} to {aside}: the run resumes from the older state of "
                f"round {round_number}, and trains the later rounds again."
            )


def _set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `checkpoint_ROUND_WHY` in the run's folder, and return its path."""
    aside = checkpoint.parent.with_name(f"checkpoint_{checkpoint.name}_{why}")
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    return checkpoint.rename(aside)

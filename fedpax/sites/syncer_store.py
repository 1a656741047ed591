"""The saved state of a syncer: a journal of its merges for each round."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.sites.journal import Journal, flush_folder, read_journal
from fedpax.sites.merge_log import append_merge, forget_merges
from fedpax.sites.message import Message, MessageError
from fedpax.sites.outer_model import FragmentState, OuterModel

FOLDER = "syncer"
VERSION = 2
KEPT = 2
"""Number of complete journals that stay beside the current one. One is enough to resume. With two,
a copy of the folder may take as long as a round."""

LOGGED = ("island", "incarnation", "sequence", "steps", "tokens", "base", "count")
"""The fields of an update in `merges.jsonl`."""


class DamagedStateError(OSError):
    """A syncer's saved state that cannot be read; the message names the remedy."""


class SyncerStore:
    """The folder in which a syncer saves its state after each merge.

    A merge appends the new state of its fragment and the manifest to a journal, with one flush to
    the disk. Fragments are merged in turn, so the journal of a complete round holds the whole
    state: a new round begins a new journal, and deletes an old one. A process that is killed at any
    moment leaves the state before the merge or after it. A copy of the folder that is made during
    the run holds the state of a moment, if less than one round passes meanwhile.

    Args:
        job_log_dir: the run's folder.

    Attributes:
        flushes: number of flushes of this process to the disk.
        written_bytes: number of bytes that this process has written.
    """

    def __init__(self, job_log_dir: Path) -> None:
        self._folder = job_log_dir / FOLDER
        self._journal: Journal | None = None
        self._before = (0, 0)

    @property
    def flushes(self) -> int:
        """Number of flushes of this process to the disk."""
        return self._before[0] + (self._journal.flushes if self._journal else 0)

    @property
    def written_bytes(self) -> int:
        """Number of bytes that this process has written."""
        return self._before[1] + (self._journal.written_bytes if self._journal else 0)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was saved."""
        return not self._journals()

    def log(self, merge: Mapping[str, Any], updates: Iterable[NamedTuple]) -> None:
        """Append a merge to `merges.jsonl`, with its updates without their arrays.

        If the process is killed before the merge is saved, `load` removes the merge again.

        Raises:
            OSError: the line cannot be written.
        """
        fields = [update._asdict() for update in updates]
        content = [{name: own[name] for name in LOGGED} for own in fields]
        append_merge(self._folder.parent, {**merge, "updates": content})

    def save(self, p: int, state: FragmentState, manifest: Mapping[str, Any]) -> None:
        """Save one fragment and the manifest; both are on the disk when this returns.

        Args:
            p: the fragment.
            state: its state.
            manifest: JSON values; `"versions"` holds the version of every fragment.

        Raises:
            OSError: a file cannot be written, for example because the disk is full.
        """
        assert self._journal is not None
        path = self._path(state.version)
        if self._journal.path != path:
            self._open(path)
            for old in self._journals()[: -1 - KEPT]:
                old.unlink(missing_ok=True)
        self._journal.append(_message(p, state, manifest))

    def save_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Save the manifest alone, with the versions of saved fragments.

        Raises:
            OSError: it cannot be written.
        """
        assert self._journal is not None
        self._journal.append(Message({"format": VERSION, "manifest": dict(manifest)}))

    def save_all(self, model: OuterModel, manifest: Mapping[str, Any]) -> None:
        """Save all fragments and the manifest, in a folder without a saved state.

        Raises:
            OSError: they cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path, draft = self._path(0), self._folder / "draft"
        draft.unlink(missing_ok=True)
        journal = Journal(draft)
        journal.append(*(_message(p, own, manifest) for p, own in enumerate(model.fragments)))
        journal.close()
        draft.replace(path)
        flush_folder(self._folder)
        flush_folder(self._folder.parent)
        self._open(path, path.stat().st_size)

    def load(self, model: OuterModel) -> dict[str, Any] | None:
        """Restore the fragments of a model, and return the manifest.

        Args:
            model: a model with the same fragments; its states are replaced.

        Returns:
            The manifest; None if nothing was saved.

        Raises:
            DamagedStateError: a file is missing, damaged, or of another model.
        """
        manifest: dict[str, Any] | None = None
        states: dict[int, FragmentState] = {}
        end, path = 0, self._folder
        try:
            for path in self._journals():
                end = 0
                for record in read_journal(path):
                    header, end = record.message.header, record.end
                    if header["format"] != VERSION:
                        raise ValueError(f"its format is {header['format']}, expected {VERSION}")
                    manifest = header["manifest"]
                    if "fragment" in header:
                        p = header["fragment"]
                        states[p] = _restore(record.message, model.fragments[p])
            if manifest is None:
                return None
            versions = [states[p].version for p in range(len(model.fragments))]
            if versions != manifest["versions"]:
                raise ValueError(f"it has versions {versions} of {manifest['versions']}")
        except (OSError, MessageError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DamagedStateError(
                f"{path} cannot be read ({type(error).__name__}: {error}), expected the state that "
                f"`fedpax syncer` saved. Restore the folder {self._folder} from a copy, or start "
                "in an empty --job_log_dir."
            ) from error
        for p, state in states.items():
            model.put(p, state)
        forget_merges(self._folder.parent, after=manifest["merges"])
        self._open(path, end)
        return manifest

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._before = self.flushes, self.written_bytes
            self._journal.close()
            self._journal = None

    def _open(self, path: Path, end: int = 0) -> None:
        self.close()
        self._journal = Journal(path, end)

    def _path(self, version: int) -> Path:
        """Return the journal of a round: its merges give each fragment this version."""
        return self._folder / f"round_{version:09}.journal"

    def _journals(self) -> list[Path]:
        return sorted(self._folder.glob("round_*.journal"))


def _message(p: int, state: FragmentState, manifest: Mapping[str, Any]) -> Message:
    leaves = jax.tree.leaves(state[:3])
    header = {"format": VERSION, "manifest": dict(manifest)}
    return Message(
        header | {"fragment": p, "version": state.version},
        {str(i): leaf for i, leaf in enumerate(leaves)},
    )


def _restore(message: Message, like: FragmentState) -> FragmentState:
    expected, tree = jax.tree.flatten(like[:3])
    leaves = [message.arrays[str(i)] for i in range(len(message.arrays))]
    types = [(x.shape, x.dtype) for x in leaves]
    if types != [(x.shape, x.dtype) for x in expected]:
        raise ValueError("it holds arrays of another model or outer optimizer")
    params, outer_state, aggregator_state = jax.tree.unflatten(tree, leaves)
    return FragmentState(params, outer_state, aggregator_state, message.header["version"])

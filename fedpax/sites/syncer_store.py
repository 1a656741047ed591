"""The saved state of a syncer: one file per fragment, and a manifest that names them."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np

from fedpax.sites.merge_log import append_merge, forget_merges
from fedpax.sites.outer_model import FragmentState, OuterModel
from fedpax.training.configuration import write_atomically

FOLDER = "syncer"
MANIFEST = "state.json"
VERSION = 1
LOGGED = ("island", "incarnation", "sequence", "steps", "tokens", "base", "count")
"""The fields of an update in `merges.jsonl`."""


class DamagedStateError(OSError):
    """A syncer's saved state that cannot be read; the message names the remedy."""


class SyncerStore:
    """The folder in which a syncer saves its state after each merge.

    A merge changes one fragment: its new file is written under a new name, then the manifest is
    replaced, then the old file is deleted. A process that is killed at any moment leaves the state
    before the merge or after it.

    Args:
        job_log_dir: the run's folder.
    """

    def __init__(self, job_log_dir: Path) -> None:
        self._folder = job_log_dir / FOLDER

    def log(self, merge: Mapping[str, Any], updates: Iterable[NamedTuple]) -> None:
        """Append a merge to `merges.jsonl`, with its updates without their arrays.

        If the process is killed before the merge is saved, `load` removes the merge again.

        Raises:
            OSError: the line cannot be written.
        """
        fields = [update._asdict() for update in updates]
        content = [{name: own[name] for name in LOGGED} for own in fields]
        append_merge(self._folder.parent, {**merge, "updates": content})

    def save(self, p: int, state: FragmentState, manifest: dict[str, Any]) -> None:
        """Save one fragment and the manifest; both are on the disk when this returns.

        Args:
            p: the fragment.
            state: its state.
            manifest: JSON values; `"versions"` holds the version of every fragment.

        Raises:
            OSError: a file cannot be written, for example because the disk is full.
        """
        self._save_fragment(p, state)
        self.save_manifest(manifest)
        self._remove_others(manifest["versions"])

    def save_all(self, model: OuterModel, manifest: dict[str, Any]) -> None:
        """Save all fragments and the manifest."""
        for p, state in enumerate(model.fragments):
            self._save_fragment(p, state)
        self.save_manifest(manifest)
        self._remove_others(manifest["versions"])

    def load(self, model: OuterModel) -> dict[str, Any] | None:
        """Restore the fragments of a model, and return the manifest.

        Args:
            model: a model with the same fragments; its states are replaced.

        Returns:
            The manifest; None if nothing was saved.

        Raises:
            DamagedStateError: a file is missing, damaged, or of another model.
        """
        path = self._folder / MANIFEST
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_bytes())
            if manifest["format"] != VERSION:
                raise ValueError(f"its format is {manifest['format']}, expected {VERSION}")
            for p, version in enumerate(manifest["versions"]):
                path = self._file(p, version)
                model.put(p, self._load_fragment(path, model.fragments[p], version))
        except (OSError, ValueError, KeyError, IndexError, TypeError, BadZipFile) as error:
            raise DamagedStateError(
                f"{path} cannot be read ({type(error).__name__}: {error}), expected the state that "
                f"`fedpax syncer` saved. Restore the folder {self._folder} from a copy, or start "
                "in an empty --job_log_dir."
            ) from error
        forget_merges(self._folder.parent, after=manifest["merges"])
        return manifest

    def _save_fragment(self, p: int, state: FragmentState) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        leaves = jax.tree.leaves(state[:3])
        with self._file(p, state.version).open("wb") as file:
            np.savez(file, *leaves)  # with a CRC-32 of each array
            file.flush()
            os.fsync(file.fileno())

    def _load_fragment(self, path: Path, like: FragmentState, version: int) -> FragmentState:
        expected, tree = jax.tree.flatten(like[:3])
        with np.load(path, allow_pickle=False) as saved:
            leaves = [saved[f"arr_{i}"] for i in range(len(saved.files))]
        types = [(x.shape, x.dtype) for x in leaves]
        if types != [(x.shape, x.dtype) for x in expected]:
            raise ValueError("it holds arrays of another model or outer optimizer")
        params, outer_state, aggregator_state = jax.tree.unflatten(tree, leaves)
        return FragmentState(params, outer_state, aggregator_state, version)

    def save_manifest(self, manifest: dict[str, Any]) -> None:
        """Save the manifest alone, with the versions of saved fragments."""
        write_atomically(
            self._folder / MANIFEST, json.dumps({"format": VERSION, **manifest}) + "\n"
        )

    def _file(self, p: int, version: int) -> Path:
        return self._folder / f"fragment_{p}_version_{version}.npz"

    def _remove_others(self, versions: list[int]) -> None:
        kept = {self._file(p, version) for p, version in enumerate(versions)}
        for path in self._folder.glob("fragment_*.npz"):
            if path not in kept:
                path.unlink(missing_ok=True)

"""Models of a run's checkpoints, written for other programs while the run trains."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.checkpoints.orbax_files import (
    atomicity_of,
    delete_folder,
    forget_place,
    literal_path,
    ocp,
    rename_folder,
)
from fedpax.checkpoints.saved_state import load_params
from fedpax.console import print_error
from fedpax.errors import ArgumentError
from fedpax.run_files.paths import CHECKPOINTS, complete_rounds, has_checksums, is_remote


def named_arrays(params: Params) -> dict[str, np.ndarray]:
    """Name the leaves of a pytree by their paths."""
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
        if name in arrays:
            raise ArgumentError(
                f"two parameters are named {name!r}, expected different names. Rename the keys "
                "that have dots."
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.dtype == np.object_:
            raise ArgumentError(
                f"{name} has dtype {leaf.dtype}, expected numbers. Leave it out of the parameters."
            )
        arrays[name] = np.asarray(leaf, order="C")
    return arrays


def write_npz(path: Path, params: Params) -> None:
    """Write parameters as a file that `numpy.load` reads."""
    arrays = named_arrays(params)
    for name, array in arrays.items():
        if array.dtype.isbuiltin != 1:
            raise ArgumentError(
                f"{name} has dtype {array.dtype}, which a .npz file cannot hold. Cast with "
                "--dtype=float32, or write --out=NAME.safetensors."
            )
    with zipfile.ZipFile(path, "w") as archive:  # numpy.savez has no array named "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def write_safetensors(path: Path, params: Params) -> None:
    """Write parameters as a safetensors file."""
    from fedpax.models.huggingface.read_model import safetensors

    use = "A safetensors file needs"
    library, arrays = safetensors("safetensors.numpy", use), named_arrays(params)
    path.touch()  # with the usual mode: safetensors makes a file that its owner alone can read
    mode = path.stat().st_mode
    try:
        library.save_file(arrays, path)
    except safetensors("safetensors").SafetensorError as error:
        raise ArgumentError(f"the format cannot hold a parameter ({error}).") from error
    path.chmod(mode)


FILE_WRITERS = {"npz": write_npz, "safetensors": write_safetensors}
"""The functions that write a file, by its suffix without the dot."""


LAST_FILE = "config.json"
"""The file that is written last: a folder without it is not complete."""


SECONDS_BETWEEN_LOOKS = 0.2


class Exports(AbstractContextManager["Exports"]):
    """A thread that writes the model of some checkpoints to `exports/ROUND`."""

    # After a kill the next process writes the folder again, from the checkpoint.

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        last: int,
        write: Callable[[Path, Params], None],
        run: Path | None = None,
        enabled: bool = True,
    ) -> None:
        self._run = folder if run is None else run
        self._drafts, self._folder = folder / "exports", self._run / "exports"
        self._every, self._last = every, last
        self._write = write
        self._enabled = enabled and every > 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        self._running: Future[None] | None = None
        self._closing = threading.Event()
        self._skipped: set[int | None] = set()

    def __enter__(self) -> "Exports":
        """Write the model that an earlier process was killed before it had written."""
        if self._enabled:
            for folder in {self._drafts, self._folder}:
                for draft in () if is_remote(folder) else folder.glob(".*.draft"):
                    shutil.rmtree(draft)
            saved = complete_rounds(self._run / CHECKPOINTS)
            for number in [number for number in saved if self._is_due(number)][-1:]:
                if not (self._folder / f"{number}" / LAST_FILE).is_file():
                    self.start(number)
        return self

    def _is_due(self, round_number: int) -> bool:
        return round_number == self._last or round_number % self._every == 0

    def end_at(self, round_number: int) -> None:
        """Let a run end before its last round: the model of this round is exported."""
        self._last = round_number

    def start(self, round_number: int) -> None:
        """Start to write the model of a checkpoint, if it is due."""
        if self._enabled and self._is_due(round_number):
            self.wait()
            self._running = self._thread.submit(self._export, round_number)

    def wait(self) -> None:
        """Wait until the last export is complete; its checkpoint must be."""
        if self._running is not None:
            self._running.result()

    def wait_if_due(self, round_number: int) -> None:
        """Wait for the export before, if saving a round removes its checkpoint."""
        if self._enabled and self._is_due(round_number):
            self.wait()

    def skip(self, round_number: int | None) -> None:
        """Do not wait for a checkpoint whose save has failed."""
        self._skipped.add(round_number)

    def _export(self, round_number: int) -> None:
        if not self._wait_until_saved(round_number):
            return
        target = self._folder / f"{round_number}"
        draft = self._drafts / f".{round_number}.draft"
        try:
            self._drafts.mkdir(exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            self._write(draft, load_params(self._run, round_number))
            if target.exists():  # of a run that has returned to an earlier round
                delete_folder(target, last=LAST_FILE)
            rename_folder(draft, target, last=LAST_FILE)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            print_error(
                f"The model of round {round_number} is not exported to {target} "
                f"({type(error).__name__}: {error}). The run continues. Correct the cause, and run "
                f"`fedpax export --job_log_dir={self._run} --round={round_number}` while "
                "the run keeps this checkpoint."
            )

    def _wait_until_saved(self, round_number: int) -> bool:
        """Return whether the checkpoint is complete; False if nothing will complete it."""
        while True:
            is_last_look = self._closing.is_set()
            if has_checksums(self._run / CHECKPOINTS / f"{round_number}"):
                return True
            if is_last_look or round_number in self._skipped:
                return False
            factor = 10 if is_remote(self._run) else 1  # a look is a request
            self._closing.wait(factor * SECONDS_BETWEEN_LOOKS)

    def __exit__(self, *error: object) -> None:
        """Wait until the export of a complete checkpoint is complete."""
        self._closing.set()
        self._thread.shutdown(wait=True)


def write_orbax(folder: Path, params: Params) -> None:
    """Write parameters as an Orbax checkpoint, `params` in a folder."""
    if jax.process_count() == 1:
        folder.mkdir(parents=True)
        with ocp.StandardCheckpointer(
            atomicity_options=atomicity_of(folder),
            # A checkpoint can be saved meanwhile: see `Checkpoints`.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        ) as checkpointer:
            checkpointer.save(literal_path(folder / "params"), params)
        forget_place(folder)
        return
    # Orbax numbers saves: after one by this process alone, its next save would wait for others.
    arguments = pickle.dumps((folder, jax.tree.map(np.asarray, params)))
    code = (
        "import pickle, sys; from fedpax.checkpoints.exports import write_orbax; "
        "write_orbax(*pickle.load(sys.stdin.buffer))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], input=arguments, env=environment, check=True)

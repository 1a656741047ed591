"""Run exported stages with JAX and NumPy alone: this module imports nothing else of fedpax.

Nothing in a folder is executed but StableHLO, whose sha256 the manifest lists.
"""

import datetime
import errno
import hashlib
import json
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FORMAT, VERSION = "fedpax stages", 1
MANIFEST = "manifest.json"
MANIFEST_BYTES, FUNCTION_BYTES = 1 << 28, 1 << 31
"""The largest files that are read."""


class ArtifactError(ValueError):
    """A folder of exported stages that cannot be used; the message names the remedy."""


class StageRequest(NamedTuple):
    """A message of the server to the participants of a stage, as `fedpax.stages` makes it."""

    stage: int
    shared: tuple[Any, ...]
    rows: tuple[Any, ...]


class Artifact:
    """Exported stages of a program; `load` makes one.

    Attributes:
        manifest: names, shapes and dtypes of all messages.
        program: the sha256 of the program. Two exports of one program have the same.
    """

    def __init__(self, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self.manifest, self._files = manifest, files
        self.program: str = manifest["program"]
        self._functions: dict[str, Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self.manifest["stages"])

    def client(
        self, stage: int
    ) -> Callable[
        [Any, Sequence[Any], Sequence[Any], Mapping[str, Any]], tuple[Any, Any, dict[str, Any]]
    ]:
        """Return the function of one participant, as `Stages.client` does."""
        messages = self.manifest["stages"][stage]
        own_names = [value["name"] for value in (*messages["own"], *messages.get("noise", ()))]
        kept_names = [value["name"] for value in messages["kept"]]
        first, second = len(messages["terms"]), len(messages["terms"]) + len(messages["shown"])
        call = self.function(f"client_{stage}")

        def client(
            index: Any, shared: Sequence[Any], rows: Sequence[Any], own: Mapping[str, Any]
        ) -> tuple[Any, Any, dict[str, Any]]:
            if missing := [name for name in own_names if name not in own]:
                raise ArtifactError(
                    f"client({stage}): own has no {missing[0]!r}, expected {own_names}. Pass the "
                    "participant's values, what earlier stages of the round returned as kept, and "
                    "noise that is drawn for this call."
                )
            given = [*shared, *rows, *(own[name] for name in own_names)]
            out = call(jnp.int32(index), *given)
            kept = dict(zip(kept_names, out[second:], strict=True))
            return tuple(out[:first]), tuple(out[first:second]), kept

        return client

    def merge(self, stage: int) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
        """Return the function that merges the terms of two groups of participants."""
        call = self.function(f"merge_{stage}")
        return lambda some, others: tuple(call(*some, *others))

    def fold(self, stage: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Return the function that merges the rows of arrays of terms `[participants, ...]`."""
        call = self.function(f"fold_{stage}")
        return lambda terms: tuple(call(*terms))

    def empty(self, stage: int) -> tuple[Any, ...]:
        """Return the terms of a stage without participants."""
        return tuple(self.function(f"empty_{stage}")())

    def run(
        self, arguments: Mapping[str, Any]
    ) -> Generator[
        StageRequest, tuple[Sequence[Any], Sequence[Any], Sequence[int]], dict[str, Any]
    ]:
        """Run the server's part, as `Stages.run` does, with arguments and results by name.

        Yields:
            A `StageRequest` for each stage.

        Receives:
            `(merged terms, shown values [answers, ...], indices of the participants)`.

        Returns:
            The server's results, without what participants keep.

        Raises:
            ArtifactError: an argument is missing, or a reply counts an unknown participant, or one
                twice.
        """
        values = self.begin(arguments)
        terms: Sequence[Any] = ()
        for part, wires in enumerate(self.manifest["server"]):
            values, request = self.advance(part, values, terms)
            terms = ()
            if request is not None:
                terms, shown, participants = yield request
                self._check_participants(request.stage, participants)
                if not len(participants):
                    terms = self.empty(request.stage)
                placed = self._place(request.stage, shown, participants)
                values.update(zip(wires["shown"], placed, strict=True))
        return self.results(values)

    def begin(self, arguments: Mapping[str, Any]) -> dict[int, Any]:
        """Return the values of the server at the start of `run`, by number."""
        for name in self.manifest["arguments"]:
            if name not in arguments:
                raise ArtifactError(
                    f"run(): arguments has no {name!r}, expected the server's arguments "
                    f"{list(self.manifest['arguments'])}. Draw noise for each run: "
                    "draw_noise(manifest['noise'])."
                )
        return {number: arguments[name] for name, number in self.manifest["arguments"].items()}

    def advance(
        self, part: int, values: Mapping[int, Any], terms: Sequence[Any]
    ) -> tuple[dict[int, Any], StageRequest | None]:
        """Run one part of the server, for an engine that keeps the values between the parts.

        Args:
            part: number of the part, from 0 to `len(manifest["server"]) - 1`.
            values: values of the server by number, with those shown by the last stage under the
                numbers in `manifest["server"][part - 1]["shown"]`.
            terms: the merged terms of the stage before; empty without one.

        Returns:
            The values and the results of the part, and the request that follows, or None.
        """
        wires = self.manifest["server"][part]
        given = [values[v] for v in wires["inputs"]]
        results = self.function(f"server_{part}")(*given, *terms)
        values = {**values, **dict(zip(wires["results"], results, strict=True))}
        if wires["stage"] is None:
            return values, None
        shared, rows = (tuple(values[v] for v in wires[kind]) for kind in ("shared", "rows"))
        return values, StageRequest(wires["stage"], shared, rows)

    def results(self, values: Mapping[int, Any]) -> dict[str, Any]:
        """Return the server's results by name, from its values after the last part."""
        return {name: values[v] for name, v in self.manifest["results"].items()}

    def _check_participants(self, stage: int, participants: Sequence[int]) -> None:
        size, indices = self.manifest["placement"]["size"], np.asarray(participants, int)
        if len(beyond := indices[(indices < 0) | (indices >= size)]):
            raise ArtifactError(
                f"The reply to stage {stage} counts participant {beyond[0]}, expected numbers from "
                f"0 to {size - 1}. Send the indices that the participants ran with."
            )
        if len(np.unique(indices)) != len(indices):
            raise ArtifactError(
                f"The reply to stage {stage} counts a participant twice. Merge each answer once."
            )

    def _place(self, stage: int, shown: Sequence[Any], participants: Sequence[int]) -> list[Any]:
        """Place the rows of the participants that answered among zeros."""
        size, indices = self.manifest["placement"]["size"], np.asarray(participants, int)
        placed = []
        for i, value in enumerate(self.manifest["stages"][stage]["shown"]):
            rows = jnp.zeros((size, *value["shape"]), value["dtype"])
            placed.append(rows.at[indices].set(shown[i]) if len(indices) else rows)
        return placed

    def exported(self, name: str) -> jax.export.Exported:
        """Return a function of the folder, such as `client_0`, as JAX exports it."""
        if f"{name}.jax" not in self._files:
            raise ArtifactError(
                f"The exported stages have no function {name!r}, expected one of "
                f"{sorted(self._files)}. Export again."
            )
        try:
            return jax.export.deserialize(bytearray(self._files[f"{name}.jax"]))
        except Exception as error:
            raise ArtifactError(
                f"{name}.jax cannot be read by jax {jax.__version__} "
                f"({type(error).__name__}: {error}). Export again, with a jax of about the "
                f"same age; this one was made by {self.manifest['versions']['jax']}."
            ) from error

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the folder, such as `client_0`, under `jax.jit`."""
        if name not in self._functions:
            self._functions[name] = jax.jit(self.exported(name).call)
        return self._functions[name]


def load(folder: str | Path, *, today: datetime.date | None = None) -> Artifact:
    """Load exported stages, after checks of format, date and all files.

    Args:
        folder: a folder that `fedpax.deploy.export_stages` wrote.
        today: the date, for the check of the last day. Default None: the machine's.

    Raises:
        ArtifactError: the folder is foreign, damaged, of a newer format, or past its last day.
        PermissionError: this user must not read the files.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(_read(path, MANIFEST_BYTES))
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({type(error).__name__}: {error}), expected exported stages. "
            "Give the folder of `fedpax export --stages`."
        ) from error
    manifest = check_manifest(manifest, path, today)
    files = {name: _checked(folder, name, manifest["files"]) for name in manifest["files"]}
    return Artifact(manifest, files)


def check_manifest(
    manifest: Any, path: str | Path, today: datetime.date | None = None
) -> dict[str, Any]:
    """Return a manifest after checks of its format, its date and its own sha256."""
    wanted = "a manifest of exported stages. Give the folder of `fedpax export --stages`."
    check_format(manifest, path, FORMAT, VERSION, wanted)
    versions = manifest.get("versions")
    if not isinstance(versions, dict) or not {"fedpax", "jax"} <= versions.keys():
        raise ArtifactError(
            f"{path} is damaged: its versions are {versions!r}, expected the versions of fedpax "
            "and jax. Export again."
        )
    if not isinstance(manifest.get("files"), dict):
        raise ArtifactError(f"{path} is damaged: it lists no files. Export again.")
    if program_hash(manifest) != manifest.get("program"):
        raise ArtifactError(f"{path} is damaged: it does not match its sha256. Export again.")
    try:
        last = datetime.date.fromisoformat(str(manifest.get("not_after")))
    except ValueError as error:
        raise ArtifactError(
            f"{path} is damaged: its not_after is {manifest.get('not_after')!r}, expected a day "
            "such as '2030-12-31'. Export again."
        ) from error
    if (today or datetime.date.today()) > last:
        raise ArtifactError(
            f"{path} could be used until {last}: later versions of jax need not read it. "
            "Export again."
        )
    return manifest


def check_format(content: Any, path: str | Path, kind: str, version: int, wanted: str) -> None:
    """Check that a file's content is of a kind, in the version that this fedpax reads."""
    if not isinstance(content, dict) or content.get("format") != kind:
        raise ArtifactError(f"{path} is not {wanted}")
    if content.get("format_version") != version:
        raise ArtifactError(
            f"{path} has format {content.get('format_version')!r}, and this fedpax reads "
            f"{version}. Update fedpax, or export again with the version here."
        )


def program_hash(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of what a manifest says about the program."""
    dated = ("program", "created", "not_after", "versions", "lines")
    content = {key: value for key, value in manifest.items() if key not in dated}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checked(folder: Path, name: str, files: Mapping[str, str]) -> bytes:
    """Return the content of a file; raise if its sha256 differs from the manifest's."""
    if Path(name).name != name or name not in files:
        raise ArtifactError(f"{folder / MANIFEST} lists no file {name!r}. Export again.")
    try:
        content = _read(folder / name, FUNCTION_BYTES)
    except PermissionError:
        raise
    except OSError as error:
        raise ArtifactError(
            f"{folder / name} cannot be read ({error.strerror}). Export again, or copy the whole "
            "folder."
        ) from error
    check_content(folder / name, content, files[name])
    return content


def _read(path: Path, most: int) -> bytes:
    """Read a regular file: reading a pipe or a device would block, or not end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        reason = f"it is not a regular file of at most {most} bytes"
        raise OSError(errno.EINVAL, reason, str(path))
    return path.read_bytes()


def check_content(path: str | Path, content: bytes, sha256: str) -> None:
    """Raise an `ArtifactError` if the content of a file has another sha256."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ArtifactError(f"{path} is damaged: it does not match its sha256. Export again.")

"""Prepare files on Apache Beam: sort them by client on many machines, into shards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from fedpax.deploy.beam import pipeline_options
from fedpax.errors import ArgumentError
from fedpax.user_files.finding import absolute, is_url
from fedpax.user_files.folders import PREPARED
from fedpax.user_files.formats import BadRows, LoadOptions
from fedpax.user_files.prepared import encode_about
from fedpax.user_files.preparing import check_arguments, draft_folder, new_folder
from fedpax.user_files.readers.image_files import describe_read
from fedpax.user_files.reading import Reading
from fedpax.user_files.selection import select_files
from fedpax.user_files.sharding import (
    GroupSurvey,
    ShardPlan,
    decode_table,
    encode_table,
    split_rows,
    survey_group,
    write_shard,
)

try:
    import apache_beam as beam
except ImportError:  # pipeline_options raises
    beam = None


class PreparedShards(NamedTuple):
    """The result of `prepare_beam`."""

    num_examples: int
    num_clients: int | None
    num_shards: int
    skipped: dict[str, int]
    first_skipped: dict[str, str]
    notes: tuple[str, ...]


def prepare_beam(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    on_bad_row: Literal["error", "skip"] = "error",
    memory: str | None = None,
    num_shards: int | None = None,
    flags: Sequence[str] = (),
    **loading: Any,
) -> PreparedShards:
    """Sort files by client on many machines, as `fedpax.data.prepare` does."""
    options = LoadOptions(**loading)
    pipeline_options("prepare_beam", flags)
    check_arguments(on_bad_row, memory)
    if num_shards is not None and num_shards < 1:
        raise ArgumentError(f"num_shards is {num_shards}, expected at least 1.")
    selected = select_files(files, options, Counter())
    groups = [
        [file._replace(path=absolute(file.path)) for file in group] for group in selected.groups
    ]
    bad_rows = BadRows() if on_bad_row == "skip" else None
    reading = Reading(selected._replace(groups=groups), options, bad_rows)
    with _place(out) as place:
        survey = beam.Map(functools.partial(_survey, reading))
        surveys = place.run(flags, len(groups), lambda numbers: numbers | "survey" >> survey)
        plan = ShardPlan.of(reading, [*map(GroupSurvey.decode, surveys)], num_shards)
        work = _Work(plan, memory or "1GiB", place)
        counts = [json.loads(content) for content in place.run(flags, len(groups), work.build)]
        shards = [item for item in counts if "shard" in item]
        if not shards:
            raise ArgumentError(
                f"{selected.name} has no examples, expected at least one. Name others."
            )
        about = {**plan.about, "num_examples": sum(shard["num_examples"] for shard in shards)}
        if reading.client is not None:
            about["num_clients"] = sum(shard["num_clients"] for shard in shards)
        about["shards"] = [shard["shard"] for shard in shards]
        place.finish(encode_about(about))
    return PreparedShards(
        about["num_examples"],
        about.get("num_clients"),
        len(shards),
        {path: count for item in counts for path, count in item.get("skipped", {}).items()},
        {path: row for item in counts for path, row in item.get("first_skipped", {}).items()},
        tuple(describe_read(sum((Counter(item.get("read")) for item in counts), Counter()))),
    )


class _Place(NamedTuple):
    """The folders that a job writes to: in a draft that becomes `out`, or in a bucket."""

    shards: str
    messages: str
    out: Path | None

    def run(self, flags: Sequence[str], count: int, build: Callable[[Any], Any]) -> list[bytes]:
        """Run a pipeline from the numbers of the groups to outcomes; return their contents."""
        path = f"{self.messages}/{uuid.uuid4().hex}"
        options = pipeline_options("prepare_beam", flags)
        with beam.Pipeline(options=options) as pipeline:
            numbers = pipeline | "groups" >> beam.Create(range(count)) | beam.Reshuffle()
            outcomes = build(numbers) | "gather" >> beam.combiners.ToList()
            _ = outcomes | "write" >> beam.Map(functools.partial(_write_outcomes, path))
        with _open(path, "rb") as file:
            table = decode_table(file.read()).sort_by("number")
        for error in table["error"].drop_null().to_pylist()[:1]:
            raise ArgumentError(error)
        return [bytes(content) for content in table["content"].to_pylist()]

    def publish(self, folder: Path, name: str) -> None:
        """Add a shard; a repeated step may have done so."""
        if self.out is not None:
            try:
                folder.rename(Path(self.shards, name))
            except OSError:
                if not Path(self.shards, name).is_dir():
                    raise
            return
        for file in sorted(folder.iterdir(), key=lambda file: file.name == PREPARED):
            with file.open("rb") as source, _open(f"{self.shards}/{name}/{file.name}", "wb") as to:
                shutil.copyfileobj(source, to, 1 << 24)

    def finish(self, about: str) -> None:
        with _open(f"{self.shards}/{PREPARED}", "wb") as file:
            file.write(about.encode())
        if self.out is not None:
            Path(self.shards).rename(self.out)


@contextlib.contextmanager
def _place(out: str | os.PathLike[str]) -> Iterator[_Place]:
    """Make the folders of a job, whose messages are removed at the end."""
    if not is_url(os.fspath(out)):
        folder = new_folder(out)
        with draft_folder(folder) as draft:
            for name in ("shards", "messages"):
                (draft / name).mkdir()
            yield _Place(str(draft / "shards"), str(draft / "messages"), folder)
        return
    import fsspec

    url = os.fspath(out).rstrip("/")
    system, path = fsspec.core.url_to_fs(url)
    if system.exists(f"{path}/{PREPARED}"):
        raise ArgumentError(f"out={url!r} exists, expected a new folder. Give another one.")
    if system.exists(path):  # remains of a job that was interrupted
        for stale in (name for name in system.ls(path, detail=False) if "/shard-" in name):
            system.rm(stale, recursive=True)
    messages = f"job-{uuid.uuid4().hex}"
    try:
        yield _Place(url, f"{url}/{messages}", None)
    finally:
        with contextlib.suppress(FileNotFoundError):
            system.rm(f"{path}/{messages}", recursive=True)


def _open(path: str, mode: str) -> Any:
    if not is_url(path):
        return Path(path).open(mode)
    import fsspec

    return fsspec.open(path, mode).open()


class _Work(NamedTuple):
    """The second pipeline."""

    plan: ShardPlan
    memory: str
    place: _Place

    def build(self, numbers: Any) -> Any:
        """Add the steps from groups of files to shards."""
        read = numbers | "read" >> beam.FlatMap(self._read).with_outputs("rows", "told")
        shards = read["rows"] | beam.GroupByKey() | "write shards" >> beam.Map(self._write)
        return (read["told"], shards) | beam.Flatten()

    def _read(self, number: int) -> Iterator[Any]:
        reading = self.plan.reading.copy()
        plan = self.plan._replace(reading=reading)
        error = None
        try:
            for shard, rows in split_rows(plan, number):
                yield beam.pvalue.TaggedOutput("rows", (shard, rows))
        except (ArgumentError, OSError) as raised:
            error = str(raised)
        bad = reading.bad_rows or BadRows()
        told = {"skipped": bad.count, "first_skipped": bad.first, "read": reading.read}
        yield beam.pvalue.TaggedOutput("told", (number, error, json.dumps(told).encode()))

    def _write(self, shard: tuple[int, Any]) -> Any:
        return _attempt(len(self.plan.reading.groups) + shard[0], lambda: self._shard(*shard))

    def _shard(self, number: int, rows: Any) -> bytes:
        name = f"shard-{number:05d}"
        parent = None if self.place.out is None else self.place.messages
        with write_shard(self.plan, rows, self.memory, parent) as folder:
            about = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
            self.place.publish(folder, name)
        return json.dumps({**about, "shard": name}).encode()


def _survey(reading: Reading, number: int) -> Any:
    return _attempt(number, lambda: survey_group(reading, number).encode())


def _attempt(number: int, function: Callable[[], bytes]) -> Any:
    """Return a number, an error in the data or None, and a content or None."""
    try:
        return number, None, function()
    except (ArgumentError, OSError) as error:
        return number, str(error), None


def _write_outcomes(path: str, outcomes: Sequence[Any]) -> None:
    columns = zip(*outcomes, strict=True)
    kinds = {"number": pa.int64(), "error": pa.string(), "content": pa.large_binary()}
    arrays = [
        pa.array(values, data_type)
        for values, data_type in zip(columns, kinds.values(), strict=True)
    ]
    with _open(path, "wb") as file:
        file.write(encode_table(pa.table(arrays, [*kinds])))

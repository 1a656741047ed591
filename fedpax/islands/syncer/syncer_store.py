"""The saved state of a syncer: a journal of its merges for each round."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.errors import ArgumentError, DamagedStateError
from fedpax.files import describe_no_permission, parse_json
from fedpax.islands.syncer.island_table import TABLE_FILE, read_islands
from fedpax.islands.syncer.journal import Journal, flush_folder, read_journal
from fedpax.islands.syncer.logs import MERGES_FILE, append_merge, read_merges, restore_merges
from fedpax.islands.syncer.outer_model import FragmentState, OuterModel
from fedpax.run_files.paths import latest_round
from fedpax.transport.message import Message, MessageError

VERSION = 3
KEPT = 2
"""Number of complete journals that stay beside the current one. One is enough to resume. With two,
a copy of the folder may take as long as a round."""

LOGGED = ("island", "incarnation", "sequence", "steps", "tokens", "base", "count")
"""The fields of an update in `merges.jsonl`."""


class SyncerStore:
    """The folder in which a syncer saves its state after each merge."""

    # A merge appends the new state of its fragment and the manifest to a journal, with one flush to
    # the disk. The journal of a complete round holds the whole state: a new round begins a new
    # journal, and deletes an old one. A killed process leaves the state before the merge or after
    # it, as does a copy of the folder that takes less than one round. A missing, cut, renamed or
    # replaced file is noticed: each record has its identifier and the previous record's, and
    # `merges.jsonl`, outside of the folder, has the identifier of each merge. A merge is written
    # there after its state: a killed process can leave a line less, never a line more.

    def __init__(self, job_log_dir: Path, allow_older: bool = False) -> None:
        self._folder, self._allow_older = job_log_dir / "syncer", allow_older
        self._journal: Journal | None = None
        self._newest: str | None = None  # the record
        self._line: dict[str, Any] = {}  # of the next merge
        self._before = (0, 0)

    @property
    def flushes(self) -> int:
        """Number of flushes of this process to the disk."""
        return self._before[0] + (self._journal.flushes if self._journal else 0)

    @property
    def written_bytes(self) -> int:
        """Number of bytes that this process has written."""
        return self._before[1] + (self._journal.written_bytes if self._journal else 0)

    def check_presence(self) -> None:
        """Check that a run's folder without a saved state has had none."""
        folder = self._folder.parent
        if self._journals():
            return
        merges, checkpoint = read_merges(folder), latest_round(folder)
        names = [island.name for island in read_islands(folder)]
        signs = (
            *([f"the outer model of round {checkpoint}"] if checkpoint else ()),
            *([f"merge {merges[-1]['merge']} in {MERGES_FILE}"] if merges else ()),
            *([f"the islands {', '.join(names)[:200]}"] if names else ()),
        )
        if signs:
            begin = f" with --training.begin_from={folder}, for its model" if checkpoint else ""
            raise DamagedStateError(
                f"{folder} holds {' and '.join(signs)}, but no state of the syncer in "
                f"{self._folder}, expected both. Restore {self._folder} from a copy, or start in "
                f"an empty --job_log_dir{begin}."
            )

    def log(self, merge: Mapping[str, Any], updates: Iterable[NamedTuple]) -> None:
        """Set the line of `merges.jsonl` of the merge that `save` saves next."""
        fields = [update._asdict() for update in updates]
        self._line = dict(merge)
        self._line["updates"] = [{name: values[name] for name in LOGGED} for values in fields]

    def save(self, p: int, state: FragmentState, manifest: Mapping[str, Any]) -> None:
        """Save a merge: its fragment and the manifest, then its line of `merges.jsonl`."""
        assert self._journal is not None
        path = self._path(state.version)
        if self._journal.path != path:
            self._open(path)
            for old in self._journals()[: -1 - KEPT]:
                old.unlink(missing_ok=True)
        line = {**self._line, "record": secrets.token_hex(8)}
        self._append([_message(p, state, manifest, {"merge": json.dumps(line)})], line["record"])
        append_merge(self._folder.parent, line)

    def save_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Save the manifest alone, with the versions of saved fragments."""
        self._append([Message({"manifest": dict(manifest)})])

    def save_all(self, model: OuterModel, manifest: Mapping[str, Any]) -> None:
        """Save all fragments and the manifest, in a folder without a saved state."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(0)
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        self._journal = Journal(draft)
        self._append([_message(p, state, manifest) for p, state in enumerate(model.fragments)])
        records, size = len(model.fragments), draft.stat().st_size
        self.close()
        draft.replace(path)
        flush_folder(self._folder)
        flush_folder(self._folder.parent)
        self._open(path, size, records)

    def load(self, model: OuterModel) -> dict[str, Any] | None:
        """Restore the fragments of a model, and return the manifest; None if nothing was saved."""
        self.check_presence()
        if not self._journals():
            return None
        manifest: dict[str, Any] = {"versions": None}
        states: dict[int, FragmentState] = {}
        merges: list[dict[str, Any]] = []
        newest: str | None = None
        end, records, path = 0, 0, self._folder
        try:
            for path in self._journals():
                end, records = 0, 0
                for record in read_journal(path):
                    header, end, records = record.message.header, record.end, records + 1
                    _check_place(header, path, newest)
                    manifest, newest = header["manifest"], header["record"]
                    if "fragment" in header:
                        p = header["fragment"]
                        states[p] = _restore(record.message, model.fragments[p])
                    if "merge" in header:
                        merges.append(parse_json(header["merge"]))
            if newest is None:
                raise ArgumentError("it has no record")
            numbers = range(len(model.fragments))
            versions = [states[p].version if p in states else None for p in numbers]
            if versions != manifest["versions"]:
                raise ArgumentError(f"it has versions {versions} of {manifest['versions']}")
        except PermissionError as error:
            raise DamagedStateError(describe_no_permission(path)) from error
        except (OSError, MessageError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DamagedStateError(
                f"{path} cannot be read ({type(error).__name__}: {error}), expected the state that "
                f"`fedpax syncer` saved. Restore the folder {self._folder} from a copy, or start "
                "in an empty --job_log_dir."
            ) from error
        self._compare(manifest, merges)
        for p, state in states.items():
            model.put(p, state)
        restore_merges(self._folder.parent, manifest["merges"], merges)
        self._open(path, end, records)
        self._newest = newest
        return manifest

    def _compare(self, manifest: Mapping[str, Any], merges: Sequence[Mapping[str, Any]]) -> None:
        """Compare the state with the files of the run's folder that tell of a newer one."""
        folder, last = self._folder.parent, manifest["merges"]
        path, known = folder / MERGES_FILE, {line["merge"]: line["record"] for line in merges}
        logged = {line["merge"]: line.get("record") for line in read_merges(folder)}
        newer = [f"{path} tells of merge {max(logged)}"] if max(logged, default=0) > last else []
        # An island is saved before it is in the table, and stays for the run.
        names = {island.name for island in read_islands(folder)} - set(manifest["islands"])
        newer += [f"{folder / TABLE_FILE} names island {name}" for name in sorted(names)[:5]]
        if newer and not self._allow_older:
            raise DamagedStateError(
                f"{self._folder} holds an older state, the one after merge {last}, but "
                f"{' and '.join(newer)}, expected the newest state. Restore the newest "
                f"{self._folder} from a copy. To train again from merge {last}, start once with "
                f"--allow_older_state: islands then take this state, and later merges are removed "
                f"from {MERGES_FILE}."
            )
        for number, record in known.items():
            if logged.get(number, record) != record:
                raise DamagedStateError(
                    f"{path} tells of another merge {number} than {self._folder}, expected files "
                    "of one history. Restore both from one copy. To keep this state without the "
                    "file, move the file away."
                )

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._before = self.flushes, self.written_bytes
            self._journal.close()
            self._journal = None

    def _append(self, messages: Sequence[Message], record: str | None = None) -> None:
        """Append records, of which each names the record before it; the last one is `record`."""
        assert self._journal is not None
        names = [*(secrets.token_hex(8) for _ in messages[1:]), record or secrets.token_hex(8)]
        befores = [self._newest, *names]
        place = {"format": VERSION, "round": self._journal.path.stem}
        records = []
        for message, name, before in zip(messages, names, befores, strict=False):
            header = {**message.header, **place, "record": name, "after": before}
            records.append(Message(header, message.arrays))
        self._journal.append(*records)
        self._newest = names[-1]

    def _open(self, path: Path, end: int = 0, records: int = 0) -> None:
        self.close()
        self._journal = Journal(path, end, records)

    def _path(self, version: int) -> Path:
        """Return the journal of a round: its merges give each fragment this version."""
        return self._folder / f"round_{version:09}.journal"

    def _journals(self) -> list[Path]:
        return sorted(self._folder.glob("round_*.journal"))


def _message(
    p: int,
    state: FragmentState,
    manifest: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> Message:
    leaves = jax.tree.leaves(state[:3])
    header = {"manifest": dict(manifest), "fragment": p, "version": state.version}
    return Message(header | dict(more or {}), {str(i): leaf for i, leaf in enumerate(leaves)})


def _check_place(header: Mapping[str, Any], path: Path, before: str | None) -> None:
    """Check that a record follows the record before it, in the journal of its name."""
    if header["format"] != VERSION:
        raise ArgumentError(f"its format is {header['format']}, expected {VERSION}")
    if header["round"] != path.stem:
        raise ArgumentError(f"it is {header['round']} under another name")
    if before is not None and header["after"] != before:
        raise ArgumentError("it does not follow the journal before it: one is missing or replaced")


def _restore(message: Message, like: FragmentState) -> FragmentState:
    expected, tree = jax.tree.flatten(like[:3])
    leaves = [message.arrays[str(i)] for i in range(len(message.arrays))]
    types = [(x.shape, x.dtype) for x in leaves]
    if types != [(x.shape, x.dtype) for x in expected]:
        raise ArgumentError("it holds arrays of another model or outer optimizer")
    params, outer_state, aggregator_state = jax.tree.unflatten(tree, leaves)
    return FragmentState(params, outer_state, aggregator_state, message.header["version"])

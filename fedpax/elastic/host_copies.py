"""Copies of a run's state in the memory of each host, from which an elastic job resumes.

If only a lost host had a shard, the run resumes from its checkpoint. Participants have **numbers**:
island 2 keeps its number when island 1 is lost.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import State
from fedpax.checkpoints.participant_states import check_resizable
from fedpax.checkpoints.run_position import StreamState
from fedpax.files import create_draft, is_private

Region: TypeAlias = tuple[tuple[int, int], ...]  # start and stop on each axis


def own_shards(leaf: jax.Array) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the values of this process's devices, each region once."""
    data = integers(leaf)
    seen = set()
    for shard in data.addressable_shards:
        region = to_region(shard.index, data.shape)
        if region not in seen:
            seen.add(region)
            yield region, np.asarray(shard.data)


def assemble(leaf: Any, shards: Mapping[Region, np.ndarray]) -> jax.Array:
    """Make a global array of this process's shards."""
    shape, sharding = shape_and_sharding(leaf)
    data = jax.make_array_from_callback(
        shape, sharding, lambda index: shards[to_region(index or (), shape)]
    )
    if not _is_key(leaf):
        return data
    implementation = _key_implementation(leaf)
    wrap = jax.jit(
        lambda data: jax.random.wrap_key_data(data, impl=implementation),
        out_shardings=leaf.sharding,
    )
    return wrap(data)


def integers(leaf: jax.Array) -> jax.Array:
    """Return an array's values; for random keys integers, with one more axis."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def shape_and_sharding(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return shape and sharding of an array's values, from the array or its abstract value."""
    if not _is_key(leaf):
        return tuple(leaf.shape), leaf.sharding
    values = jax.eval_shape(jax.random.key_data, _shape(leaf))
    sharding = leaf.sharding
    spec = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)), None)
    return values.shape, NamedSharding(sharding.mesh, PartitionSpec(*spec))


def integer_dtype(leaf: Any) -> np.dtype:
    """Return the dtype of an array's values, from the array or its abstract value."""
    return np.dtype(np.uint32) if _is_key(leaf) else np.dtype(leaf.dtype)


def to_region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the region of an index into an array of a shape."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_implementation(leaf: Any) -> str:
    names: list[Any] = []
    jax.eval_shape(lambda keys: names.append(jax.random.key_impl(keys)), _shape(leaf))
    return str(names[0])


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


SIZE_OF_LENGTH = 8  # bytes
ALIGNMENT = 64


class SavedShard(NamedTuple):
    """A shard in a copy."""

    region: Region  # its place in the whole array
    values: np.ndarray


class HostCopy(NamedTuple):
    """This process's copy of the state after a round."""

    round: int
    # The numbers of the participants; None if they do not depend on the processes.
    participants: list[int] | None
    stream_state: StreamState
    shapes: Mapping[str, tuple[int, ...]]  # the shape of each whole array, by its path in the state
    blocks: Mapping[str, list[SavedShard]]  # this process's shards of each array

    def restore(self, like: State, participants: Sequence[int] | None) -> State | None:
        """Restore the state on the devices of another mesh; None if this copy lacks values."""
        # No process waits for another. `like`: abstract values with their shardings. Raises a
        # ValueError if the method does not allow another number of participants.
        before, now = self.participants, None if participants is None else list(participants)
        if (before is None) != (now is None):
            return None
        if before is not None and now is not None and before != now:
            if len(before) == len(now) == 1:
                return None  # rows of participants cannot be told from other arrays
            check_resizable(like, len(before), len(now))
        paths, tree = jax.tree_util.tree_flatten_with_path(like)
        restored = []
        for path, leaf in paths:
            shards = self._shards(jax.tree_util.keystr(path), leaf, now)
            if shards is None:
                return None
            restored.append(assemble(leaf, shards))
        return jax.tree.unflatten(tree, restored)

    def replace_rows(
        self, state: State, participants: Sequence[int], replaced: Sequence[int]
    ) -> State:
        """Replace the state of the participants `own` by this copy's, as far as it has it."""
        # No process waits for another.
        replaced = [number for number in replaced if number in (self.participants or ())]
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._with_rows(
                jax.tree_util.keystr(path), leaf, participants, replaced
            ),
            state,
        )

    def _shards(self, name: str, leaf: Any, now: list[int] | None) -> dict[Region, Any] | None:
        """Return the values of each region that this process's devices hold."""
        saved, (shape, sharding) = self.shapes.get(name), shape_and_sharding(leaf)
        rows = None
        if saved is not None and now is not None and self._is_placed(saved, shape, now, sharding):
            rows = now
        elif saved != shape:
            return None
        shards: dict[Region, Any] = {}
        for index in sharding.addressable_devices_indices_map(shape).values():
            region = to_region(index, shape)
            if region not in shards:
                values = self._read(name, region, rows, integer_dtype(leaf))
                if values is None:
                    return None
                shards[region] = values
        return shards

    def _is_placed(
        self, saved: tuple[int, ...], shape: tuple[int, ...], now: list[int], sharding: Any
    ) -> bool:
        """Return whether an array has a row per participant."""
        assert self.participants is not None
        if not saved or not shape or saved[1:] != shape[1:]:
            return False
        if (saved[0], shape[0]) != (len(self.participants), len(now)):
            return False
        return saved != shape or tuple(sharding.spec)[:1] not in ((), (None,))

    def _read(
        self, name: str, region: Region, rows: list[int] | None, dtype: np.dtype
    ) -> np.ndarray | None:
        """Return the values of a region; None if this copy lacks some."""
        values = np.empty([stop - start for start, stop in region], dtype)
        if rows is None:
            return values if self._fill(name, region, values) else None
        assert self.participants is not None
        (start, stop), rest = region[0], region[1:]
        for place, number in enumerate(rows[start:stop]):
            if number not in self.participants:
                return None
            row = self.participants.index(number)
            if not self._fill(name, ((row, row + 1), *rest), values[place : place + 1]):
                return None
        return values

    def _fill(self, name: str, region: Region, values: np.ndarray) -> bool:
        """Copy a region from the blocks into `values`; return whether all of it was found."""
        filled = 0
        for block in self.blocks.get(name, ()):
            if block.values.dtype != values.dtype:
                return False
            common = [
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, block.region, strict=True)
            ]
            if all(start < stop for start, stop in common):
                target = tuple(
                    slice(a - start, b - start)
                    for (a, b), (start, _) in zip(common, region, strict=True)
                )
                source = tuple(
                    slice(a - start, b - start)
                    for (a, b), (start, _) in zip(common, block.region, strict=True)
                )
                values[target] = block.values[source]
                filled += math.prod(stop - start for start, stop in common)
        return filled == values.size

    def _with_rows(
        self, name: str, leaf: jax.Array, participants: Sequence[int], replaced: Sequence[int]
    ) -> jax.Array:
        saved, (shape, sharding) = self.shapes.get(name), shape_and_sharding(leaf)
        now = list(participants)
        if not replaced or saved is None or not self._is_placed(saved, shape, now, sharding):
            return leaf
        shards = {}
        for shard in integers(leaf).addressable_shards:
            region = to_region(shard.index, shape)
            if region in shards:
                continue
            values = np.array(shard.data)
            (start, stop), rest = region[0], region[1:]
            for place, number in enumerate(now[start:stop]):
                if number in replaced:
                    row = ((start + place, start + place + 1), *rest)
                    row_values = self._read(name, row, now, values.dtype)
                    if row_values is not None:
                        values[place : place + 1] = row_values
            shards[region] = values
        return assemble(leaf, shards)


def rows_on_this_process(state: State, participants: Sequence[int]) -> set[int]:
    """Return the numbers of the participants whose states this process's devices hold."""
    # There are at least two participants.
    numbers: set[int] = set()
    for leaf in jax.tree.leaves(state):
        is_placed = tuple(leaf.sharding.spec)[:1] not in ((), (None,))
        if leaf.shape[:1] == (len(participants),) and is_placed:
            for shard in integers(leaf).addressable_shards:
                numbers.update(participants[shard.index[0]])
    return numbers


class HostCopies:
    """This process's copies of the state, in a folder in the host's memory."""

    # Processes are at most a round apart: with two copies they have one round in common.

    def __init__(self, folder: Path, job: str, keep: int = 2) -> None:
        self._folder, self._job, self._keep = folder, job, keep

    def rounds(self) -> list[int]:
        """Return the rounds of the copies, in ascending order."""
        return rounds_of(list_copies(self._folder), self._job)

    def save(
        self,
        round_number: int,
        state: State,
        stream_state: StreamState,
        participants: Sequence[int] | None = None,
    ) -> None:
        """Copy this process's shards of the state; raise an OSError if the memory is full."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(self._folder):
            raise PermissionError(f"{self._folder} is not a folder of this user alone")
        rounds = self.rounds()
        kept = [number for number in rounds if number < round_number][1 - self._keep :]
        for number in rounds:
            if number not in kept:
                self._path(number).unlink(missing_ok=True)
        draft = self._folder / "draft"
        try:
            with os.fdopen(create_draft(draft), "wb") as file:
                _write(file, round_number, state, stream_state, participants)
            draft.replace(self._path(round_number))
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def load(self, round_number: int) -> HostCopy | None:
        """Return the copy of a round; None if there is none."""
        path = self._path(round_number)
        try:
            return _read_copy(path)
        except (OSError, ValueError, KeyError):
            return None

    def _path(self, round_number: int) -> Path:
        return self._folder / f"{self._job}-{round_number}"


def memory_folder(base: str | Path | None, job_log_dir: str | Path, process: int) -> Path:
    """Return the folder of a process's copies, by default in `/dev/shm`."""
    if not base:
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else tempfile.gettempdir()
    name = hashlib.sha256(str(Path(job_log_dir).resolve()).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(base) / f"fedpax-{user}-{name}-{process}"


def list_copies(folder: Path) -> list[str]:
    """Return the names of the copies in a folder, of any job."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if re.fullmatch(r"\w+-\d+", name)]
    return []


def rounds_of(names: Sequence[str], job: str) -> list[int]:
    """Return the rounds of a job's copies in ascending order."""
    pairs = (name.rpartition("-") for name in names)
    return sorted(int(number) for owner, _, number in pairs if owner == job)


def remove_copies(folder: Path, *, but: str = "") -> None:
    """Remove the copies in a folder, except of the job `but`, and the folder if it is empty."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not but or name.rpartition("-")[0] != but:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _write(
    file: Any,
    round_number: int,
    state: State,
    stream_state: StreamState,
    participants: Sequence[int] | None,
) -> None:
    """Write a JSON header with its length in front, then the blocks."""
    leaves, blocks, offset = [], [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        places = []
        for region, values in own_shards(leaf):
            places.append((region, offset))
            blocks.append(values)
            offset += _padded(values.nbytes)
        shape, _ = shape_and_sharding(leaf)
        name = jax.tree_util.keystr(path)
        leaves.append((name, shape, integer_dtype(leaf).name, places))
    if isinstance(stream_state, bytes):
        stream: Any = {"hex": stream_state.hex()}
    else:
        stream = {"json": stream_state}
    header = json.dumps(
        {
            "round": round_number,
            "participants": None if participants is None else list(participants),
            "stream": stream,
            "leaves": leaves,
        }
    ).encode()
    header += b" " * (_padded(len(header) + SIZE_OF_LENGTH) - len(header) - SIZE_OF_LENGTH)
    file.write(len(header).to_bytes(SIZE_OF_LENGTH, "little") + header)
    for values in blocks:
        file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        file.write(b"\0" * (_padded(values.nbytes) - values.nbytes))


def _read_copy(path: Path) -> HostCopy:
    content = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(content[:SIZE_OF_LENGTH].tobytes(), "little")
    start = SIZE_OF_LENGTH + length
    header = json.loads(content[SIZE_OF_LENGTH:start].tobytes())
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, list[SavedShard]] = {}
    for name, shape, dtype, places in header["leaves"]:
        shapes[name] = tuple(shape)
        blocks[name] = []
        for region, offset in places:
            sizes = [b - a for a, b in region]
            size = math.prod(sizes) * np.dtype(dtype).itemsize
            raw = content[start + offset : start + offset + size]
            values = raw.view(np.dtype(dtype)).reshape(sizes)
            blocks[name].append(SavedShard(tuple((a, b) for a, b in region), values))
    stream = header["stream"]
    state = bytes.fromhex(stream["hex"]) if "hex" in stream else stream["json"]
    return HostCopy(header["round"], header["participants"], state, shapes, blocks)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

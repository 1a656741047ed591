"""The stream of `token_rounds`: row n of the run is the next row of shard n mod `num_shards`."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from fedpax.clients.cohort import MASK, Cohort
from fedpax.data.rounds.document_shard import DocumentOrder, Shard, ShardPosition
from fedpax.data.rounds.documents import Field
from fedpax.data.rounds.mixture import Mixture, apportion
from fedpax.data.rounds.stream_parts import (
    LocalRows,
    RowMask,
    check_same_texts,
    check_state,
    source_name,
    texts_fingerprint,
)
from fedpax.errors import ArgumentError
from fedpax.populations.partition import Indices
from fedpax.sources.shuffle import hash_key, shuffled_index
from fedpax.sources.source import Examples
from fedpax.text.conversation import Conversation
from fedpax.text.packing import Batch, TokenPairs, to_batch
from fedpax.text.tokenizer import Tokenizer

_MIN_DOCUMENTS = 64  # of a shard, so that epochs of all shards have similar lengths
IN_MIXTURE = "mixture: "
"""Prefix of the settings of one of several data sets."""


class DataSet(NamedTuple):
    """A part of the data with its own shards: a data set, or the documents of an island."""

    name: str
    source: Examples
    field: Field
    # The documents' indices in the source; for all documents, their number.
    documents: Indices | int
    key: UInt64[np.ndarray, ""]  # selects the order of documents and rows

    def num_shards(self, most: int) -> int:
        """Return the largest divisor of `most` that leaves each shard enough documents."""
        total = self.documents if isinstance(self.documents, int) else len(self.documents)
        limit = max(1, min(most, total // _MIN_DOCUMENTS))
        return next(number for number in range(limit, 0, -1) if most % number == 0)


class _Progress(NamedTuple):
    """The position of a stream, but for its shards."""

    rounds: int
    steps: int
    rows: int  # over all islands
    credits: list[float]  # rows that each data set is owed, see `apportion`


class TokenRounds:
    """An endless iterator over rounds of packed text; made by `token_rounds`.

    Attributes:
        shape: `(islands, local_steps, batch_size, seq_len)`, the shape of every array of a round.
        items_per_round: the number of target tokens in a round, over all islands.
        item_unit: `"tokens"`.
        settings: the settings that a stream must have to restore a state of this one.
    """

    item_unit = "tokens"

    def __init__(
        self,
        mixture: Mixture,
        data_sets: list[DataSet],
        shape: tuple[int, int, int, int],
        rows: RowMask,
        *,
        by_island: bool,
        seed: int,
        shuffle_tokens: int,
        num_shards: int | None,
        tokenizer: Tokenizer,
        settings: dict[str, int | str],
    ) -> None:
        self.shape = shape
        self.items_per_round = math.prod(shape)
        self.settings = settings
        self._mixture = mixture
        self._data_sets = data_sets
        self._is_scored = any(isinstance(d.field, Conversation) for d in data_sets)
        self._set_mask(rows)
        self._by_island = by_island
        self._seed = seed
        self._shuffle_tokens = shuffle_tokens
        self._fixed_shards = num_shards
        self._tokenizer = tokenizer
        islands, _, batch_size, _ = shape
        # Rows of a step that are numbered together.
        self._rows_per_step = batch_size if by_island else islands * batch_size
        self._open(
            num_shards or self._rows_per_step, {}, _Progress(0, 0, 0, [0.0] * len(data_sets))
        )

    def _set_mask(self, rows: RowMask) -> None:
        self._mask = rows
        places = np.full(rows.shape, -1)  # in this process's arrays
        places[rows] = np.arange(rows.sum())
        self._places = places.transpose(1, 0, 2).ravel()  # steps, islands, batch

    def fingerprint(self) -> dict[str, str]:
        """Return the number of documents and a checksum of each data set's sample, by name."""
        if not self._by_island:
            return self._samples
        partition = self.settings["partition"]
        return {name: f"{text}, partition {partition}" for name, text in self._samples.items()}

    @functools.cached_property
    def _samples(self) -> dict[str, str]:
        if self._by_island:  # the islands have one source
            first = self._data_sets[0]
            return {source_name(first.source): texts_fingerprint(first.source, first.field)}
        return {d.name: texts_fingerprint(d.source, d.field) for d in self._data_sets}

    def keep_island(self, island: int) -> None:
        """Read only the rows of one island, bitwise the same, from now on, as `LocalRows`."""
        rows = np.zeros_like(self._mask)
        rows[island] = self._mask[island]
        if not rows.any():
            raise ArgumentError(
                f"island is {island}, but this process has no row of it. Make the stream with "
                "rows=None, or with rows of this island."
            )
        positions = self.get_state()["shards"]
        self._set_mask(rows)
        self._open(self._num_shards, positions, self._progress)

    def _open(
        self, num_shards: int, positions: Mapping[str, list[Any]], progress: _Progress
    ) -> None:
        """Move to a position: open the shards of this process's rows."""
        self._num_shards = num_shards
        self._progress = progress
        self._counts = [data_set.num_shards(num_shards) for data_set in self._data_sets]
        self._shards = {
            (number, shard): self._shard(data_set, shard, self._counts[number])
            for number, data_set in enumerate(self._data_sets)
            for shard in self._own_shards(number)
        }
        for (number, shard), opened in self._shards.items():
            saved = positions.get(self._data_sets[number].name)
            if saved is not None and saved[shard] is not None:
                opened.position = ShardPosition(*map(int, saved[shard]))

    def _own_shards(self, number: int) -> list[int]:
        """Return the shards of a data set that rows of this process come from, in any round."""
        rows = self._mask[number] if self._by_island else self._mask
        slots = rows.any(axis=-2)  # islands, batch; or batch
        count = self._counts[number]
        common = math.gcd(self._rows_per_step, count)
        residues = {(self._first_row + slot) % common for slot in np.flatnonzero(slots).tolist()}
        return [shard for shard in range(count) if shard % common in residues]

    def _shard(self, data_set: DataSet, shard: int, count: int) -> Shard:
        return Shard(
            data_set.source,
            DocumentOrder(data_set.documents, shard, count, data_set.key),
            hash_key(data_set.key, 2, shard),
            field=data_set.field,
            tokenizer=self._tokenizer,
            seq_len=self.shape[-1],
            window_tokens=max(1, self._shuffle_tokens // count),
        )

    @property
    def _first_row(self) -> int:
        """The number of the next round's first row."""
        rows = self._progress.rows
        return rows // self.shape[0] if self._by_island else rows

    def __iter__(self) -> "TokenRounds":
        return self

    def __next__(self) -> Cohort:
        before = {name: shard.position for name, shard in self._shards.items()}
        try:
            data_sets, credits = self._assign()
            pairs = self._read(data_sets)
        except BaseException:  # a damaged file, or Ctrl-C: all shards must be at the same round
            for name, position in before.items():
                self._shards[name].position = position
            raise
        rounds, steps, rows, _ = self._progress
        steps_per_round = self.shape[1]
        num_rows = math.prod(self.shape[:3])
        self._progress = _Progress(rounds + 1, steps + steps_per_round, rows + num_rows, credits)
        batch = to_batch(pairs) if self._is_scored else without_mask(to_batch(pairs))
        if self._mask.all():
            return Cohort({name: rows.reshape(self.shape) for name, rows in batch.items()})
        return Cohort({name: LocalRows(rows, self._mask) for name, rows in batch.items()})

    def _assign(self) -> tuple[Int64[np.ndarray, "steps islands batch"], list[float]]:
        """Choose the data set of each row of the next round; return the credits afterwards."""
        islands, num_steps, batch_size, _ = self.shape
        progress = self._progress
        if self._by_island:
            island_of_row = np.arange(islands)[None, :, None]
            return np.broadcast_to(
                island_of_row, (num_steps, islands, batch_size)
            ), progress.credits
        if len(self._data_sets) == 1:
            return np.zeros((num_steps, islands, batch_size), np.int64), progress.credits
        size = islands * batch_size
        shares = self._mixture.shares(progress.rounds)
        chosen, credits = apportion(progress.credits, shares, num_steps * size)
        # In another order in each step: no island and no shard may always get the same data set.
        keys = hash_key(self._seed, 3, progress.steps + np.arange(num_steps))
        order = shuffled_index(np.arange(size), size, keys[:, None])
        mixed = np.take_along_axis(chosen.reshape(num_steps, size), order, axis=1)
        return mixed.reshape(num_steps, islands, batch_size), credits

    def _read(self, data_sets: Int64[np.ndarray, "steps islands batch"]) -> TokenPairs:
        """Read this process's rows of the next round, in the order islands, steps, batch."""
        islands, num_steps, batch_size, seq_len = self.shape
        counted_islands = 1 if self._by_island else islands
        numbers = np.arange(num_steps * self._rows_per_step).reshape(
            num_steps, counted_islands, batch_size
        )
        shards = (self._first_row + numbers) % np.array(self._counts)[data_sets]
        starts = np.concatenate([[0], np.cumsum(self._counts)])
        codes = (starts[data_sets] + shards).ravel()
        order = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes[order], np.arange(starts[-1] + 1))
        num_own = int(self._mask.sum())
        pairs = TokenPairs(
            np.empty((num_own, seq_len), np.int32),
            np.empty((num_own, seq_len), np.int32),
            np.empty((num_own, seq_len), np.bool_),
            np.empty((num_own, seq_len), np.bool_),
        )
        for (number, shard), opened in self._shards.items():
            code = starts[number] + shard
            rows = self._places[order[ends[code] : ends[code + 1]]]
            for part in opened.take(len(rows)):
                place, rows = rows[: len(part.inputs)], rows[len(part.inputs) :]
                is_read = place >= 0  # -1: a row of another process
                for array, values in zip(pairs, part, strict=True):
                    array[place[is_read]] = values[is_read]
        return pairs

    def get_state(self) -> dict[str, Any]:
        """Return the stream's position after the last round, as JSON values."""
        # With several processes, None is the position of a shard that only other processes read.
        # `fedpax.checkpoints.run_position.gather_stream_state` completes it.
        progress = self._progress
        names = [data_set.name for data_set in self._data_sets]

        def position(number: int, shard: int) -> list[int] | None:
            opened = self._shards.get((number, shard))
            return None if opened is None else list(opened.position)

        return {
            "settings": dict(self.settings),
            "data": dict(self._samples),
            "rounds": progress.rounds,
            "steps": progress.steps,
            "rows": progress.rows,
            "credits": dict(zip(names, progress.credits, strict=True)),
            "num_shards": self._num_shards,
            "shards": {
                name: [position(number, shard) for shard in range(count)]
                for number, (name, count) in enumerate(zip(names, self._counts, strict=True))
            },
        }

    def set_state(self, state: Any) -> None:
        """Move to a saved position; the following rows are bitwise equal."""
        # The number of processes, local steps and rows per step may differ, and without a partition
        # the number of islands too. A data set that is new in a mixture starts at its beginning.
        if isinstance(state, Mapping) and {"settings", "islands"} <= state.keys():
            raise ArgumentError(
                "The state was saved by an earlier version of fedpax, which ordered rows by "
                "island: those rows cannot be continued. Start the data again with "
                "--allow_config_change=data, or resume with the version that saved the state."
            )
        settings = self.settings
        if isinstance(state, Mapping) and isinstance(saved := state.get("settings"), Mapping):
            one_sided = {n for n in settings.keys() ^ saved.keys() if n.startswith(IN_MIXTURE)}
            settings = {name: x for name, x in settings.items() if name not in one_sided}
            saved = {name: x for name, x in saved.items() if name not in one_sided}
            if "data" in state and "num_documents" in settings.keys() & saved.keys():
                saved["num_documents"] = settings["num_documents"]  # `data` tells both numbers
            state = {**state, "settings": saved}
        positions = check_state(state, settings, "shards")
        check_same_texts(self._samples, state.get("data", {}))  # absent from earlier versions
        num_shards = int(state["num_shards"])
        if self._fixed_shards not in (None, num_shards):
            raise ArgumentError(
                f"The state was saved by a stream with num_shards={num_shards}, but this stream "
                f"has {self._fixed_shards}: set num_shards to {num_shards}, or leave it out."
            )
        credits = [float(state["credits"].get(d.name, 0.0)) for d in self._data_sets]
        rounds, steps, rows = (int(state[name]) for name in ("rounds", "steps", "rows"))
        self._open(num_shards, positions, _Progress(rounds, steps, rows, credits))


def without_mask(batch: Batch) -> Batch:
    """Drop the mask: all rows of a round are full, and all targets count."""
    return {name: rows for name, rows in batch.items() if name != MASK}

import hashlib
import json
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from fedpax.data import (
    SEPARATOR,
    Deferred,
    Source,
    TokenRounds,
    partition_by_field,
    partition_iid,
    token_round_shapes,
    token_rounds,
)
from fedpax.data.text.packing import Batch

SIZES: dict[str, Any] = {"islands": 2, "local_steps": 3, "batch": 2, "length": 16}


def rows_of(rounds: TokenRounds, island: int, count: int) -> NDArray[np.int32]:
    """The inputs of an island's next rounds, as rows."""
    inputs = np.stack([next(rounds)["inputs"][island] for _ in range(count)])
    return inputs.reshape(-1, inputs.shape[-1])


def texts_of(rows: NDArray[np.int32]) -> list[bytes]:
    """The documents of rows that follow each other, without the last, which may be cut."""
    return rows.astype(np.uint8).tobytes().split(bytes([SEPARATOR]))[1:-1]


def same(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) and first[name].dtype == second[name].dtype
        for name in first
    )


def test_a_round_has_the_promised_arrays(documents: list[dict[str, bytes]]) -> None:
    rounds = token_rounds(documents, **SIZES)
    batches = next(rounds)
    assert {name: array.dtype for name, array in batches.items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "segments": np.int32,
        "positions": np.int32,
        "mask": np.float32,
    }
    assert {array.shape for array in batches.values()} == {(2, 3, 2, 16)}
    assert rounds.shape == (2, 3, 2, 16)
    assert rounds.items_per_round == 2 * 3 * 2 * 16 == batches["mask"].sum()
    assert batches["segments"].min() == 1
    following = next(rounds)
    assert not any(np.shares_memory(batches[name], following[name]) for name in batches)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**40))
@settings(max_examples=10)
def test_every_epoch_has_each_document_of_the_island_once(
    islands: int, length: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    documents = [
        {"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()}
        for n in rng.integers(0, 30, 11)
    ]
    partition = partition_iid(len(documents), islands, seed=seed)
    for island, indices in enumerate(partition):
        shard = [documents[index]["text"] for index in indices]
        epoch = sum(len(text) + 1 for text in shard)
        # Unshuffled rows, so that documents can be read off them.
        sizes: dict[str, Any] = {"islands": islands, "local_steps": 1, "batch": 3, "length": length}
        rounds = token_rounds(documents, **sizes, seed=seed, shuffle_tokens=1)
        seen = texts_of(rows_of(rounds, island, 3 * epoch // (3 * length) + 2))
        for number in range(3):
            of_epoch = seen[number * len(shard) : (number + 1) * len(shard)]
            assert Counter(of_epoch) == Counter(shard)


def test_each_epoch_has_another_order(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    texts = [example["text"] for example in source]
    tokens = sum(map(len, texts)) + len(texts)
    rounds = token_rounds(source, islands=1, local_steps=1, batch=4, length=8192, shuffle_tokens=1)
    seen = texts_of(rows_of(rounds, 0, 2 * tokens // (4 * 8192) + 2))
    first, second = seen[: len(texts)], seen[len(texts) : 2 * len(texts)]
    assert Counter(first) == Counter(second) == Counter(texts)
    assert first != second
    assert first != texts


@pytest.mark.parametrize("shuffle_tokens", [32, 120, 16_000])
def test_windows_only_change_the_order_of_rows(
    documents: list[dict[str, bytes]], shuffle_tokens: int
) -> None:
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 1, "batch": 1, "length": 16}
    plain = token_rounds(documents, **sizes, shuffle_tokens=1)
    mixed = token_rounds(documents, **sizes, shuffle_tokens=shuffle_tokens)
    a, b = [], []
    moved = False
    for _ in range(400):
        a.append(next(plain)["inputs"][0].tobytes())
        b.append(next(mixed)["inputs"][0].tobytes())
        if mixed.get_state()["islands"][0][2] == 0:  # a window has ended
            assert Counter(a) == Counter(b)
            moved = moved or a != b
            a, b = [], []
    assert moved


def test_rows_of_a_batch_come_from_many_documents(text: Callable[[str], Source]) -> None:
    source = text("train")
    rounds = token_rounds(source, islands=2, local_steps=1, batch=8, length=64)
    partition = partition_iid(len(source), 2)
    shard = [source[int(index)]["text"] for index in partition[0]]
    holders = []
    for row in next(rounds)["inputs"][0, 0]:
        piece = max(row.astype(np.uint8).tobytes().split(bytes([SEPARATOR])), key=len)
        holders.append(next(n for n, text in enumerate(shard) if piece in text))
    assert len(set(holders)) >= 5


def test_islands_read_disjoint_shards_and_one_island_reads_all() -> None:
    # Each document is a letter of its own.
    documents = [{"text": bytes([97 + n]) * 20} for n in range(12)]
    rounds = token_rounds(documents, islands=3, local_steps=5, batch=4, length=32)
    inputs = np.concatenate([next(rounds)["inputs"] for _ in range(4)], axis=1)
    letters = [set(np.unique(part)) - {SEPARATOR} for part in inputs]
    assert sum(map(len, letters)) == len(set.union(*letters)) == 12
    alone = token_rounds(documents, islands=1, local_steps=5, batch=4, length=32)
    assert set(np.unique(next(alone)["inputs"])) == {*range(97, 109), SEPARATOR}


def test_islands_by_client_do_not_share_clients(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    partition = partition_by_field(source, "client", 3)
    rounds = token_rounds(source, islands=3, local_steps=4, batch=8, length=64, partition=partition)
    separator = bytes([SEPARATOR])
    shards = [separator.join(source[int(n)]["text"] for n in held) for held in partition]
    for island, rows in enumerate(next(rounds)["inputs"].reshape(3, -1, 64)):
        pieces = [row.astype(np.uint8).tobytes().strip(separator) for row in rows]
        longest = [max(piece.split(separator), key=len) for piece in pieces]
        assert all(piece in shards[island] for piece in longest)
        others = separator.join(shards[:island] + shards[island + 1 :])
        assert sum(piece in others for piece in longest) < len(longest) / 4  # as lines of spaces


def test_the_seed_and_nothing_else_decides(documents: list[dict[str, bytes]]) -> None:
    first, again, other = (next(token_rounds(documents, **SIZES, seed=seed)) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 2000), st.integers(1, 60))
def test_a_restored_stream_goes_on_bitwise(
    before: int, between: int, shuffle_tokens: int, length: int
) -> None:
    rng = np.random.default_rng(length)
    documents = [
        {"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()}
        for n in rng.integers(0, 300, 9)
    ]
    sizes: dict[str, Any] = {"islands": 3, "local_steps": 2, "batch": 2, "length": length}
    stream, other = (token_rounds(documents, **sizes, shuffle_tokens=shuffle_tokens) for _ in "ab")
    for _ in range(before):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(4)]
    for _ in range(between):  # the other stands anywhere
        next(other)
    for restored in (stream, other):
        restored.set_state(state)
        assert restored.get_state() == state
        assert all(same(batches, next(restored)) for batches in following)


def digest(rounds: Iterator[Batch], count: int) -> str:
    value = hashlib.sha256()
    for _ in range(count):
        for name, array in sorted(next(rounds).items()):
            value.update(name.encode() + array.tobytes())
    return value.hexdigest()


def test_another_process_goes_on_bitwise(text: Callable[[str], Source], data_dir: Path) -> None:
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 10, "batch": 8, "length": 128}
    rounds = token_rounds(text("heldout"), **sizes, shuffle_tokens=12_800)
    for _ in range(67):  # past the first epoch, and within a window
        next(rounds)
    state = rounds.get_state()
    assert all(document > 33 and row for document, _, row in state["islands"])
    script = textwrap.dedent(
        f"""
        import json, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_token_rounds import digest
        from fedpax.data import load, token_rounds
        source = load("stdlib_text", "heldout", data_dir={str(data_dir)!r})
        rounds = token_rounds(source, **{sizes}, shuffle_tokens=12_800)
        rounds.set_state(json.loads({json.dumps(state)!r}))
        print(digest(rounds, 5))
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [digest(rounds, 5)]


class Counting(Sequence[Mapping[str, Any]]):
    """Counts how often a source is read, and can fail once."""

    def __init__(self, source: Sequence[Mapping[str, Any]]) -> None:
        self.source = source
        self.reads = 0
        self.fails_at: int | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        if self.reads == self.fails_at:
            raise OSError("damaged")
        return self.source[index]


def test_restoring_reads_one_window_and_no_more(text: Callable[[str], Source]) -> None:
    source = Counting(text("heldout"))
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 10, "batch": 8, "length": 128}
    rounds = token_rounds(source, **sizes, shuffle_tokens=6_400)
    for _ in range(150):
        next(rounds)
    state, following = rounds.get_state(), next(rounds)
    restored = token_rounds(source, **sizes, shuffle_tokens=6_400)
    whole_run, source.reads = source.reads, 0
    restored.set_state(state)
    assert source.reads == 0
    assert same(next(restored), following)
    # A round is 80 rows an island, so parts of three windows of 50 rows (6,400 tokens).
    assert source.reads < whole_run / 5


def test_a_shard_that_fits_in_a_window_is_read_once(documents: list[dict[str, bytes]]) -> None:
    source = Counting(documents)
    rounds = token_rounds(source, **SIZES)
    for _ in range(50):
        next(rounds)
    assert source.reads <= len(documents)


def test_a_failed_round_can_be_drawn_again(documents: list[dict[str, bytes]]) -> None:
    source = Counting(documents)
    rounds = token_rounds(source, **SIZES, shuffle_tokens=64)
    plain = token_rounds(documents, **SIZES, shuffle_tokens=64)
    for k in range(30):
        source.fails_at = source.reads + 3 if k % 3 == 0 else None
        batches = next(plain)
        state = rounds.get_state()
        try:
            drawn = next(rounds)
        except OSError:
            source.fails_at = None
            # The same settings at the same place, although the source has another name.
            assert rounds.get_state() == state
            drawn = next(rounds)
        assert same(drawn, batches)
    assert rounds.get_state()["islands"] == plain.get_state()["islands"]


def test_a_state_of_another_stream_is_refused(documents: list[dict[str, bytes]]) -> None:
    rounds = token_rounds(documents, **SIZES)
    state = rounds.get_state()
    with pytest.raises(ValueError, match=r"seed is 5 and was 0.*Make the stream with the settings"):
        token_rounds(documents, **SIZES, seed=5).set_state(state)
    with pytest.raises(ValueError, match="length is 17 and was 16"):
        token_rounds(documents, **{**SIZES, "length": 17}).set_state(state)
    with pytest.raises(ValueError, match="documents is 19 and was 20, partition is"):
        token_rounds(documents[:-1], **SIZES).set_state(state)
    with pytest.raises(ValueError, match="A stream's state is a dict with 'settings'"):
        rounds.set_state({"next_index": 3})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_not_positive_are_refused(
    documents: list[dict[str, bytes]], name: str, size: int
) -> None:
    with pytest.raises(ValueError, match=f"{name} is {size}, but must be at least 1"):
        token_rounds(documents, **{**SIZES, name: size})


def test_other_bad_arguments_are_refused(documents: list[dict[str, bytes]]) -> None:
    with pytest.raises(ValueError, match=r"TiB|GiB of memory: make one of them smaller"):
        token_rounds(documents, **{**SIZES, "length": 10**12})
    with pytest.raises(ValueError, match="20 examples cannot be shared among 21 participants"):
        token_rounds(documents, **{**SIZES, "islands": 21})
    with pytest.raises(ValueError, match="0 examples cannot be shared"):
        token_rounds([], **SIZES)
    with pytest.raises(ValueError, match="shuffle_tokens is 0"):
        token_rounds(documents, **SIZES, shuffle_tokens=0)
    with pytest.raises(KeyError, match="no field 'body', but 'text'"):
        next(token_rounds(documents, **SIZES, field="body"))
    with pytest.raises(TypeError, match="A text must be str or bytes, not ndarray"):
        next(token_rounds([{"text": np.zeros(3)}] * 2, **SIZES))


def test_gives_millions_of_tokens_a_second(text: Callable[[str], Source]) -> None:
    rounds = token_rounds(text("train"), islands=4, local_steps=10, batch=8, length=256)
    next(rounds)
    count = 12_000_000 // rounds.items_per_round  # more than an epoch
    start = time.process_time()
    for _ in range(count):
        next(rounds)
    speed = count * rounds.items_per_round / (time.process_time() - start)
    assert speed > 2e6, f"{speed:.3g} tokens a second of one core"


def test_shapes_are_told_without_reading(documents: list[dict[str, bytes]]) -> None:
    told = token_round_shapes(**SIZES)
    batch = next(token_rounds(documents, **SIZES))
    assert {n: (x.shape, x.dtype) for n, x in told.items()} == {
        n: (x.shape, x.dtype) for n, x in batch.items()
    }


def test_a_deferred_stream_is_opened_once_and_when_it_is_used(
    documents: list[dict[str, bytes]],
) -> None:
    opened = []

    def make() -> TokenRounds:
        opened.append(True)
        return token_rounds(documents, **SIZES)

    stream, plain = Deferred(make), token_rounds(documents, **SIZES)
    assert not opened
    next(stream), next(plain)
    state = stream.get_state()
    assert state == plain.get_state()
    following = next(stream)
    stream.set_state(state)
    for got in (next(stream), next(plain)):
        np.testing.assert_array_equal(got["inputs"], following["inputs"])
    assert opened == [True]

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

import chex
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from fedpax.clients import Cohort
from fedpax.data import (
    SEPARATOR,
    LazyStream,
    Source,
    TokenRounds,
    partition_by_field,
    partition_iid,
    token_round_shapes,
    token_rounds,
)

SIZES: dict[str, Any] = {"islands": 2, "local_steps": 3, "batch_size": 2, "seq_len": 16}


def rows_of(rounds: TokenRounds, island: int, count: int) -> NDArray[np.int32]:
    """Return the inputs of an island's next rounds, as rows."""
    inputs = np.stack([next(rounds).batches["inputs"][island] for _ in range(count)])
    return inputs.reshape(-1, inputs.shape[-1])


def texts_of(rows: NDArray[np.int32]) -> list[bytes]:
    """Return the documents of consecutive rows, without the last, which may be incomplete."""
    return rows.astype(np.uint8).tobytes().split(bytes([SEPARATOR]))[1:-1]


def test_a_round_has_the_documented_arrays(documents: list[dict[str, bytes]]) -> None:
    rounds = token_rounds(documents, **SIZES)
    batches = next(rounds).batches
    assert {name: array.dtype for name, array in batches.items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "segments": np.int32,
        "positions": np.int32,
    }
    assert {array.shape for array in batches.values()} == {(2, 3, 2, 16)}
    assert rounds.shape == (2, 3, 2, 16)
    assert rounds.items_per_round == 2 * 3 * 2 * 16 == batches["targets"].size
    assert rounds.item_unit == "tokens"
    assert batches["segments"].min() == 1
    following = next(rounds).batches
    assert not any(np.shares_memory(batches[name], following[name]) for name in batches)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**40))
@settings(max_examples=10)
def test_every_epoch_has_each_document_of_the_island_once(
    islands: int, seq_len: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    documents = [
        {"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()}
        for n in rng.integers(0, 30, 11)
    ]
    partition = partition_iid(len(documents), islands, seed=seed)
    longest = max(sum(len(documents[i]["text"]) + 1 for i in part) for part in partition)
    # Rows are not shuffled, so documents can be read from them.
    rounds = token_rounds(
        documents,
        islands=islands,
        local_steps=3 * longest // seq_len + 2,
        batch_size=1,
        seq_len=seq_len,
        seed=seed,
        partition=partition,
        shuffle_tokens=1,
    )
    inputs = next(rounds).batches["inputs"]
    for island, indices in enumerate(partition):
        shard = [documents[index]["text"] for index in indices]
        seen = texts_of(inputs[island].reshape(-1, seq_len))
        for number in range(3):
            of_epoch = seen[number * len(shard) : (number + 1) * len(shard)]
            assert Counter(of_epoch) == Counter(shard)


def test_every_epoch_has_another_order(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    texts = [example["text"] for example in source]
    tokens = sum(map(len, texts)) + len(texts)
    rounds = token_rounds(
        source, islands=1, local_steps=1, batch_size=4, seq_len=8192, shuffle_tokens=1
    )
    seen = texts_of(rows_of(rounds, 0, 2 * tokens // (4 * 8192) + 2))
    first, second = seen[: len(texts)], seen[len(texts) : 2 * len(texts)]
    assert Counter(first) == Counter(second) == Counter(texts)
    assert first != second
    assert first != texts


@pytest.mark.parametrize("shuffle_tokens", [32, 120, 16_000])
def test_shuffling_only_changes_the_order_of_rows_within_windows(
    documents: list[dict[str, bytes]], shuffle_tokens: int
) -> None:
    sizes: dict[str, Any] = {"islands": 1, "local_steps": 1, "batch_size": 1, "seq_len": 16}
    plain = token_rounds(documents, **sizes, shuffle_tokens=1)
    mixed = token_rounds(documents, **sizes, shuffle_tokens=shuffle_tokens)
    a, b = [], []
    moved = False
    for _ in range(400):
        a.append(next(plain).batches["inputs"][0].tobytes())
        b.append(next(mixed).batches["inputs"][0].tobytes())
        (((_, _, row),),) = mixed.get_state()["shards"].values()
        if row == 0:  # a window has ended
            assert Counter(a) == Counter(b)
            moved = moved or a != b
            a, b = [], []
    assert moved


def test_rows_of_a_batch_come_from_many_documents(text: Callable[[str], Source]) -> None:
    source = text("train")
    rounds = token_rounds(source, islands=2, local_steps=1, batch_size=8, seq_len=64)
    shard = [example["text"] for example in source]
    origins = []
    for row in next(rounds).batches["inputs"][0, 0]:
        piece = max(row.astype(np.uint8).tobytes().split(bytes([SEPARATOR])), key=len)
        origins.append(next(n for n, text in enumerate(shard) if piece in text))
    assert len(set(origins)) >= 5


def test_islands_with_a_partition_read_their_own_documents_and_one_island_reads_all() -> None:
    # Each document repeats its own letter.
    documents = [{"text": bytes([97 + n]) * 20} for n in range(12)]
    partition = [np.arange(0, 12, 3), np.arange(1, 12, 3), np.arange(2, 12, 3)]
    rounds = token_rounds(
        documents, islands=3, local_steps=5, batch_size=4, seq_len=32, partition=partition
    )
    inputs = np.concatenate([next(rounds).batches["inputs"] for _ in range(4)], axis=1)
    letters = [set(np.unique(part)) - {SEPARATOR} for part in inputs]
    assert letters == [{97 + n for n in part} for part in partition]
    alone = token_rounds(documents, islands=1, local_steps=5, batch_size=4, seq_len=32)
    assert set(np.unique(next(alone).batches["inputs"])) == {*range(97, 109), SEPARATOR}


def test_islands_by_client_do_not_share_clients(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    partition = partition_by_field(source, "client", 3)
    rounds = token_rounds(
        source, islands=3, local_steps=4, batch_size=8, seq_len=64, partition=partition
    )
    separator = bytes([SEPARATOR])
    shards = [separator.join(source[int(n)]["text"] for n in indices) for indices in partition]
    for island, rows in enumerate(next(rounds).batches["inputs"].reshape(3, -1, 64)):
        pieces = [row.astype(np.uint8).tobytes().strip(separator) for row in rows]
        longest = [max(piece.split(separator), key=len) for piece in pieces]
        assert all(piece in shards[island] for piece in longest)
        others = separator.join(shards[:island] + shards[island + 1 :])
        assert (
            sum(piece in others for piece in longest) < len(longest) / 4
        )  # such as lines of spaces


def test_the_seed_determines_the_rounds(documents: list[dict[str, bytes]]) -> None:
    first, again, other = (next(token_rounds(documents, **SIZES, seed=seed)) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(first.batches["inputs"], other.batches["inputs"])


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 2000), st.integers(1, 60))
@settings(max_examples=10)
def test_a_restored_stream_continues_bitwise(
    before: int, between: int, shuffle_tokens: int, seq_len: int
) -> None:
    rng = np.random.default_rng(seq_len)
    documents = [
        {"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()}
        for n in rng.integers(0, 300, 9)
    ]
    sizes: dict[str, Any] = {"islands": 3, "local_steps": 2, "batch_size": 2, "seq_len": seq_len}
    stream, other = (token_rounds(documents, **sizes, shuffle_tokens=shuffle_tokens) for _ in "ab")
    for _ in range(before):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(4)]
    for _ in range(between):  # the other stream has any position
        next(other)
    for restored in (stream, other):
        restored.set_state(state)
        assert restored.get_state() == state
        for cohort in following:
            chex.assert_trees_all_equal(next(restored), cohort)


def digest(rounds: Iterator[Cohort], count: int) -> str:
    """Hash the next rounds."""
    value = hashlib.sha256()
    for _ in range(count):
        for name, array in sorted(next(rounds).batches.items()):
            value.update(name.encode() + array.tobytes())
    return value.hexdigest()


@pytest.mark.slow
def test_another_process_continues_bitwise(text: Callable[[str], Source], data_dir: Path) -> None:
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 10, "batch_size": 8, "seq_len": 128}
    rounds = token_rounds(text("heldout"), **sizes, shuffle_tokens=12_800)
    for _ in range(67):  # past the first epoch, and within a window
        next(rounds)
    state = rounds.get_state()
    (((document, _, row),),) = state["shards"].values()
    assert document > 66 and row
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
    """A source that counts its reads and can fail once."""

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


def test_restoring_reads_only_the_current_window(text: Callable[[str], Source]) -> None:
    source = Counting(text("heldout"))
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 10, "batch_size": 8, "seq_len": 128}
    rounds = token_rounds(source, **sizes, shuffle_tokens=6_400)
    for _ in range(150):
        next(rounds)
    state, following = rounds.get_state(), next(rounds)
    restored = token_rounds(source, **sizes, shuffle_tokens=6_400)
    whole_run, source.reads = source.reads, 0
    restored.set_state(state)
    assert source.reads <= 256  # the sample that tells whether the documents are the same
    source.reads = 0
    chex.assert_trees_all_equal(next(restored), following)
    # A round has 80 rows per island: parts of three windows of 50 rows (6,400 tokens).
    assert source.reads < whole_run / 5


def test_a_shard_that_fits_in_a_window_is_read_once(documents: list[dict[str, bytes]]) -> None:
    source = Counting(documents)
    rounds = token_rounds(source, **SIZES)
    for _ in range(50):
        next(rounds)
    assert source.reads <= len(documents) + 1  # one to check the field


def test_a_failed_round_can_be_repeated(documents: list[dict[str, bytes]]) -> None:
    source = Counting(documents)
    rounds = token_rounds(source, **SIZES, shuffle_tokens=64)
    plain = token_rounds(documents, **SIZES, shuffle_tokens=64)
    rounds.fingerprint()  # a part of every state, read once
    for k in range(30):
        source.fails_at = source.reads + 3 if k % 3 == 0 else None
        expected = next(plain)
        state = rounds.get_state()
        try:
            cohort = next(rounds)
        except OSError:
            source.fails_at = None
            # The position has not changed.
            assert rounds.get_state() == state
            cohort = next(rounds)
        chex.assert_trees_all_equal(cohort, expected)
    assert [*rounds.get_state()["shards"].values()] == [*plain.get_state()["shards"].values()]


def test_a_state_of_another_stream_raises(documents: list[dict[str, bytes]]) -> None:
    rounds = token_rounds(documents, **SIZES)
    state = rounds.get_state()
    with pytest.raises(
        ValueError, match=r"seed is 5 and was 0.*Make the stream with the saved set"
    ):
        token_rounds(documents, **SIZES, seed=5).set_state(state)
    with pytest.raises(ValueError, match="seq_len is 17 and was 16"):
        token_rounds(documents, **{**SIZES, "seq_len": 17}).set_state(state)
    fewer = token_rounds(documents[:-1], **SIZES)
    with pytest.raises(ValueError, match=r"list has 19 documents, sample \w+, and had 20 doc"):
        fewer.set_state(state)
    with pytest.raises(ValueError, match="num_documents is 19 and was 20"):
        fewer.set_state({k: x for k, x in state.items() if k != "data"})
    with pytest.raises(ValueError, match="A stream's state is a dict with 'settings'"):
        rounds.set_state({"next_index": 3})
    with pytest.raises(ValueError, match=r"earlier version.*--allow_config_change=data"):
        rounds.set_state({"settings": {}, "islands": [[0, 0, 0]] * 2})


def test_documents_that_were_edited_raise(documents: list[dict[str, bytes]]) -> None:
    rounds = token_rounds(documents, **SIZES)
    next(rounds)
    state = json.loads(json.dumps(rounds.get_state()))
    edited = token_rounds([{"text": x["text"].upper()} for x in documents], **SIZES)
    with pytest.raises(ValueError, match=r"list has 20 doc.*, and had 20.*Restore the") as error:
        edited.set_state(state)
    assert "add --allow_config_change=data to" in str(error.value.in_flags)
    edited.set_state({name: value for name, value in state.items() if name != "data"})
    former = token_rounds([{"text": np.arange(5_000) % 7}], **SIZES).fingerprint()
    changed = np.arange(5_000) % 7
    changed[2_500] += 1  # where NumPy's text of the array has "..."
    assert token_rounds([{"text": changed}], **SIZES).fingerprint() != former


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_1_raise(documents: list[dict[str, bytes]], name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {size}, expected at least 1"):
        token_rounds(documents, **{**SIZES, name: size})


def test_other_bad_arguments_raise(documents: list[dict[str, bytes]]) -> None:
    with pytest.raises(ValueError, match=r"TiB|GiB of memory: reduce one of these sizes"):
        token_rounds(documents, **{**SIZES, "seq_len": 10**12})
    with pytest.raises(ValueError, match="list has no documents: load another split"):
        token_rounds([], **SIZES)
    with pytest.raises(ValueError, match="num_shards is 0, expected at least 1"):
        token_rounds(documents, **SIZES, num_shards=0)
    with pytest.raises(ValueError, match="shuffle_tokens is 0"):
        token_rounds(documents, **SIZES, shuffle_tokens=0)
    with pytest.raises(KeyError, match="no field 'body', but 'text'"):
        token_rounds(documents, **SIZES, field="body")
    with pytest.raises(TypeError, match=r"A text is of type ndarray .* expected str or bytes"):
        token_rounds([{"text": np.zeros(3)}] * 2, **SIZES)


def test_packing_makes_two_million_tokens_per_second(text: Callable[[str], Source]) -> None:
    rounds = token_rounds(text("train"), islands=4, local_steps=10, batch_size=8, seq_len=256)
    next(rounds)
    count = 12_000_000 // rounds.items_per_round  # more than an epoch
    start = time.process_time()
    for _ in range(count):
        next(rounds)
    speed = count * rounds.items_per_round / (time.process_time() - start)
    assert speed > 2e6, f"{speed:.3g} tokens per second on one core"


def test_token_round_shapes_are_those_of_a_round(documents: list[dict[str, bytes]]) -> None:
    cohort = next(token_rounds(documents, **SIZES))
    chex.assert_trees_all_equal_shapes_and_dtypes(token_round_shapes(**SIZES), cohort)


def test_a_lazy_stream_is_opened_once_at_its_first_use(
    documents: list[dict[str, bytes]],
) -> None:
    opened = []

    def make() -> TokenRounds:
        opened.append(True)
        return token_rounds(documents, **SIZES)

    stream, plain = LazyStream(make), token_rounds(documents, **SIZES)
    assert not opened
    next(stream), next(plain)
    state = stream.get_state()
    assert state == plain.get_state()
    following = next(stream)
    stream.set_state(state)
    for cohort in (next(stream), next(plain)):
        chex.assert_trees_all_equal(cohort, following)
    assert opened == [True]


def test_a_document_that_cannot_be_read_is_named(documents: list[dict[str, Any]]) -> None:
    rounds = token_rounds([*documents[:11], {"text": None}, *documents[11:]], **SIZES)
    with pytest.raises(TypeError, match=r"^Example 11 of list, counted from 0: .*leave out such"):
        for _ in range(20):
            next(rounds)

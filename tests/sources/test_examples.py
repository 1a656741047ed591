"""What users have in memory: records, columns, data frames and tables give the same examples."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedpax.data import (
    ClientSampler,
    Mixture,
    cohort_rounds,
    example_batches,
    example_rounds,
    heldout_token_batches,
    pack,
    partition_by_field,
    partition_dirichlet,
    partition_natural,
    read_examples,
    token_rounds,
)
from fedpax.data.rounds.client_token_rows import pack_clients
from fedpax.populations.partition import check_partition
from fedpax.simulation import Trace
from fedpax.sources.source import Columns, as_examples
from fedpax.user_paths import find_paths

NAMES = ["b", "a", "b", "c", "a", "a"]
COLUMNS = {"client": NAMES, "label": [4, 0, 1, 2, 0, 3], "text": [6 * name for name in NAMES]}
RECORDS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]

KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "columns": dict,
    "arrays": lambda columns: {name: np.array(values) for name, values in columns.items()},
    "structured array": lambda columns: np.rec.fromarrays(
        [np.array(values) for values in columns.values()], names=list(columns)
    ),
    "pyarrow": lambda columns: pytest.importorskip("pyarrow").table(columns),
    "pandas": lambda columns: pytest.importorskip("pandas").DataFrame(columns, index=[*"zyxwvu"]),
    "polars": lambda columns: pytest.importorskip("polars").DataFrame(columns),
}


def lists(parts: list[Any]) -> list[list[int]]:
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_examples_of_its_records(kind: str) -> None:
    source = KINDS[kind](COLUMNS)
    assert [dict(example) for example in as_examples(source)] == RECORDS
    parts = partition_natural(source, "client")
    assert lists(parts) == [[1, 4, 5], [0, 2], [3]] and parts.names == ["a", "b", "c"]
    assert lists(partition_by_field(source, "client", 2)) == lists(
        partition_by_field(RECORDS, "client", 2)
    )
    rounds = [
        token_rounds(data, islands=1, local_steps=2, batch_size=2, seq_len=5)
        for data in (source, RECORDS)
    ]
    result, wanted = (next(stream).batches["inputs"] for stream in rounds)
    np.testing.assert_array_equal(result, wanted)
    rows, _ = pack_clients(source, seq_len=4)
    np.testing.assert_array_equal(rows["inputs"], pack_clients(RECORDS, seq_len=4)[0]["inputs"])
    batches = heldout_token_batches(source, batch_size=2, seq_len=8)
    assert sum(batch["mask"].sum() for batch in batches) == 7 * len(RECORDS)


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_columns_are_those_of_records(kind: str, rng: np.random.Generator) -> None:
    if kind in ("structured array", "polars", "pyarrow"):
        pytest.skip("no column of images")
    images = list(rng.integers(0, 256, (6, 2, 2, 1), np.uint8))
    source = KINDS[kind](COLUMNS | {"image": images})
    records = [{"image": x, "label": k} for x, k in zip(images, COLUMNS["label"], strict=True)]
    for result, wanted in zip(
        read_examples(source).values(), read_examples(records).values(), strict=True
    ):
        np.testing.assert_array_equal(result, wanted)
    population = partition_natural(source, "client")
    pairs = [
        next(cohort_rounds(data, population, ClientSampler(3, 3), batch_size=2))
        for data in (source, records)
    ]
    for name in ("image", "label", "mask"):
        np.testing.assert_array_equal(*(cohort.batches[name] for cohort in pairs))


def test_a_column_alone_is_a_population() -> None:
    arrow = pytest.importorskip("pyarrow")
    for column in (NAMES, tuple(NAMES), np.array(NAMES), arrow.chunked_array([NAMES])):
        parts = partition_natural(column)
        assert lists(parts) == [[1, 4, 5], [0, 2], [3]] and parts.names == ["a", "b", "c"]


USES: dict[str, Callable[[Any], Any]] = {
    "partition_natural": lambda data: partition_natural(data, "client"),
    "partition_by_field": lambda data: partition_by_field(data, "client", 1),
    "token_rounds": lambda data: token_rounds(
        data, islands=1, local_steps=1, batch_size=1, seq_len=4
    ),
    "Mixture": lambda data: Mixture({"source": data}, {"source": 1.0}),
    "pack_clients": lambda data: pack_clients(data, seq_len=4),
    "heldout": lambda data: heldout_token_batches(data, batch_size=1, seq_len=4),
    "read_examples": read_examples,
    "example_rounds": lambda data: example_rounds(data, num_clients=1, local_steps=1, batch_size=1),
    "cohort_rounds": lambda data: cohort_rounds(data, [[0]], ClientSampler(1, 1), batch_size=1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (record for record in RECORDS), "is a generator, expected.*list("),
        (lambda: iter(RECORDS), "is a list_iterator, expected.*list("),
        (lambda: list(NAMES), "is a list of str, expected.*[{'text': text} for text in"),
        (lambda: [b"text"], "is a list of bytes, expected.*[{'text': text} for text in"),
        (lambda: [(1, "a")], "is a list of tuple, expected.*give dicts"),
        (lambda: "to be", "is a str, expected"),
        (lambda: None, "is a NoneType, expected"),
        (lambda: np.zeros((3, 2)), "is a ndarray, expected.*Name its field: {"),
        (lambda: {"text": "to be"}, "whose field 'text' is a str, expected.*in a list"),
    ],
)
def test_other_data_name_the_types_that_are_accepted(
    use: str, make: Callable[[], Any], words: str
) -> None:
    accepted = "a list of dicts .*a dict of columns.*a data frame or table"
    with pytest.raises(TypeError, match=".*".join(map(re.escape, words.split(".*")))) as error:
        USES[use](make())
    assert re.search(accepted, str(error.value))


def test_columns_of_different_lengths_and_missing_values_raise() -> None:
    with pytest.raises(ValueError, match=r"\{'a': 2, 'b': 1\} examples, expected one length"):
        Columns({"a": [1, 2], "b": [1]})
    with pytest.raises(ValueError, match=r"'client' is nan for example 1, expected a value"):
        partition_natural({"client": np.array([1.0, np.nan])}, "client")
    for source in (RECORDS, COLUMNS):
        with pytest.raises(TypeError, match=r"no field, expected.*partition_natural\(source, 'cli"):
            partition_natural(source)


def test_columns_become_batches_to_evaluate_on() -> None:
    batches = example_batches({"label": [3, 1, 2]}, 2)
    assert [batch["label"].tolist() for batch in batches] == [[3, 1], [2, 3]]
    with pytest.raises(TypeError, match=r"examples is a list, expected.*read_examples\(source\)"):
        example_batches(RECORDS, 2)


def test_masked_values_are_never_read_as_values():
    labels = np.ma.array([1, 2, 0, 1], mask=[0, 1, 0, 0])
    images = np.zeros((4, 2, 2, 1), np.float32)
    records = [{"image": x, "label": y} for x, y in zip(images, labels, strict=True)]
    for read in (
        lambda: read_examples({"image": images, "label": labels}),
        lambda: read_examples(records),
        lambda: partition_natural({"user": labels}, "user"),
        lambda: partition_dirichlet(labels, 1, alpha=1.0),
        lambda: check_partition([labels], 1, 9, "clients"),
        lambda: ClientSampler(4, 1, weights=labels),
        lambda: Trace(labels),
    ):
        with pytest.raises(ValueError, match=r"masked values, expected a value.*filled"):
            read()


@pytest.mark.parametrize("number", [2.5, "2", np.nan, None, 2 + 0j])
def test_sizes_that_are_not_integers_are_named(number):
    labels = np.arange(8)
    for make in (
        lambda: partition_dirichlet(labels, number, alpha=1.0),
        lambda: partition_dirichlet(labels, 2, alpha=1.0, min_examples=number),
        lambda: ClientSampler(number, 1),
        lambda: ClientSampler(4, number),
        lambda: example_batches({"label": labels}, number),
        lambda: pack([np.array([1])], number),
    ):
        with pytest.raises(TypeError, match=f"is {re.escape(repr(number))}, expected"):
            make()


def test_a_folder_named_like_a_home_is_itself(tmp_path, monkeypatch):
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "f.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_paths("./~/f*") == [tmp_path / "~" / "f.txt"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array(["a", None, "b"], object), "is missing in example 1, expected.*fill in"),
        ([1, "1", True], r"has the value 1 and, for example 2, True.*Convert the values"),
        ([2, 2.0], r"has the value 2 and, for example 1, 2.0.*one type"),
    ],
)
def test_values_that_name_no_client_or_two_raise(values, words):
    with pytest.raises(ValueError, match=words):
        partition_natural({"client": values}, "client")

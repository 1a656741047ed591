"""Fingerprints of data: equal for equal data, and different for other data under the same name."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from fedpax.clients.cohort import fingerprint
from fedpax.data import (
    ClientSampler,
    FunctionRounds,
    LazyStream,
    Mixture,
    cohort_rounds,
    example_rounds,
    load,
    partition_iid,
    token_rounds,
    unreliable_rounds,
)
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.data.rounds.stream_parts import arrays_fingerprint, texts_fingerprint

SIZES = {"islands": 2, "local_steps": 1, "batch_size": 1, "seq_len": 4}


def documents(seed: int, number: int = 300) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"text": rng.integers(97, 123, 20, np.uint8).tobytes()} for _ in range(number)]


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (40, 4, 4, 1), np.uint8)
    return {"image": images, "label": np.arange(40) % 3}


def examples(seed: int) -> list[dict[str, Any]]:
    fields = arrays(seed)
    return [{name: values[i] for name, values in fields.items()} for i in range(40)]


def clients(source: Any) -> Any:
    population = [np.arange(k, 40, 4) for k in range(4)]
    return cohort_rounds(source, population, ClientSampler(4, 2), batch_size=2)


def records(seed: int, folder: Path) -> Any:
    where = folder / str(seed) / "corpus.array_record"
    where.parent.mkdir(exist_ok=True)
    writer = ArrayRecordWriter(str(where), "group_size:1")
    for document in documents(seed):
        writer.write(document["text"])
    writer.close()
    return token_rounds(load(str(where), "train"), **SIZES)


def mixture(seed: int) -> Any:
    sets = {"web": documents(0), "code": documents(seed)}
    return token_rounds(Mixture(sets, {"web": 1.0, "code": 1.0}), **SIZES)


def partition(seed: int) -> Any:
    return token_rounds(documents(0), partition=partition_iid(300, 2, seed=seed), **SIZES)


KINDS: dict[str, Callable[[int], Any]] = {
    "list": lambda seed: token_rounds(documents(seed), **SIZES),
    "grain": lambda seed: token_rounds(grain.MapDataset.source(documents(seed)), **SIZES),
    "mixture": mixture,
    "partition": partition,
    "lazy": lambda seed: LazyStream(lambda: mixture(seed)),
    "examples": lambda seed: example_rounds(
        examples(seed), num_clients=2, local_steps=1, batch_size=2
    ),
    "cohorts of arrays": lambda seed: clients(arrays(seed)),
    "cohorts of examples": lambda seed: clients(examples(seed)),
    "unreliable": lambda seed: unreliable_rounds(clients(examples(seed)), dropout_probability=0.5),
    "scheduled": lambda seed: ScheduledRounds(mixture(seed), lambda cohort, r: cohort),
}


@pytest.mark.parametrize("kind", [*KINDS, "records"])
def test_equal_data_have_equal_fingerprints(kind: str, tmp_path: Path) -> None:
    make = KINDS.get(kind, functools.partial(records, folder=tmp_path))
    stream = make(0)
    prints = fingerprint(stream)
    assert prints and prints == fingerprint(make(0)) != fingerprint(make(1))
    if kind != "partition":
        next(stream)  # the position does not matter
        assert fingerprint(stream) == prints


def test_the_number_of_documents_counts() -> None:
    few, many = (token_rounds(documents(0)[:n], **SIZES) for n in (200, 201))
    (few_text,), (many_text,) = fingerprint(few).values(), fingerprint(many).values()
    assert few_text.startswith("200 documents, sample ")
    assert many_text.startswith("201 documents, sample ") and few_text[4:] != many_text[4:]


def test_at_most_256_documents_are_read() -> None:
    class Counted(list):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.read += 1
            return super().__getitem__(index)

    stream = token_rounds(Counted(documents(0, 5000)), **SIZES)
    Counted.read = 0
    fingerprint(stream)
    assert Counted.read == 256


def test_text_and_bytes_are_the_same_document() -> None:
    whole = documents(0)
    text = [{"text": document["text"].decode()} for document in whole]
    assert fingerprint(token_rounds(whole, **SIZES)) == fingerprint(token_rounds(text, **SIZES))


def test_a_stream_of_ones_own_has_no_fingerprint() -> None:
    assert fingerprint(FunctionRounds(lambda r: None)) == {}  # type: ignore[arg-type, return-value]


def test_the_order_of_examples_changes_a_fingerprint():
    labels = np.arange(3)
    assert arrays_fingerprint({"label": labels}) != arrays_fingerprint({"label": labels[::-1]})
    corpus = [{"text": "to be"}, {"text": b"or not"}]
    assert texts_fingerprint(corpus, "text") != texts_fingerprint(corpus[::-1], "text")

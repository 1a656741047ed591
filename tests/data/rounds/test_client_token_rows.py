"""Clients' text as rows: every token once, and no row with tokens of two clients."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpax.data import (
    SEPARATOR,
    ClientSampler,
    Conversation,
    cohort_rounds,
    decode,
    heldout_token_batches,
    load,
    pack,
    token_rounds,
)
from fedpax.data.rounds.client_token_rows import pack_clients, preprocess_rows
from fedpax.text.tokenizer_json import encode

RANDOM = np.random.default_rng(0)
NAMES = ["b", "a", "b", "c", "a", "b"]
TEXTS = ["".join(RANDOM.choice(list("xyz é"), RANDOM.integers(1, 40))) for _ in NAMES]
SOURCE = [{"client": n, "text": t} for n, t in zip(NAMES, TEXTS, strict=True)]


def test_the_rows_of_a_client_are_its_packed_documents() -> None:
    rows, population = pack_clients(SOURCE, seq_len=7)
    batch = preprocess_rows(rows)
    assert np.concatenate(population).tolist() == list(range(len(rows["inputs"])))
    for name, indices in zip(["a", "b", "c"], population, strict=True):
        texts = [t for n, t in zip(NAMES, TEXTS, strict=True) if n == name]
        expected = pack([encode(t) for t in texts], seq_len=7)
        assert expected.keys() == batch.keys()
        for field, values in expected.items():
            np.testing.assert_array_equal(batch[field][indices], values)
        valid = batch["mask"][indices] > 0
        targets = batch["targets"][indices][valid]
        assert decode(targets[targets != SEPARATOR]) == "".join(texts)


def test_cohorts_have_the_rows_of_their_clients_and_a_mask_per_token() -> None:
    rows, population = pack_clients(SOURCE, seq_len=7)
    rounds = cohort_rounds(
        rows, population, ClientSampler(3, 3), batch_size=2, preprocess=preprocess_rows
    )
    cohort = next(rounds)
    expected = preprocess_rows(rows)
    assert cohort.batches["mask"].dtype == np.float32
    for k, client in enumerate(cohort.client_ids):
        inputs, mask = (cohort.batches[f][k].reshape(-1, 7) for f in ("inputs", "mask"))
        used = mask.any(-1)
        own = expected["inputs"][population[client]]
        assert sorted(map(tuple, inputs[used])) == sorted(map(tuple, own))
        assert mask.sum() == expected["mask"][population[client]].sum()
        assert cohort.num_examples[k] == len(own)


def test_the_embedded_text_has_a_client_for_each_module() -> None:
    source = load("stdlib_text", "train")
    rows, population = pack_clients(source, seq_len=4096)
    clients = {source[i]["client"] for i in range(len(source))}
    assert len(population) == len(clients) > 100
    tokens = sum(len(source[i]["text"]) + 1 for i in range(len(source)))
    assert rows["valid"].sum() == tokens


@pytest.mark.parametrize(
    ("source", "seq_len", "words"),
    [([], 8, "no examples to train on: load another split"), (SOURCE, 0, "seq_len is 0")],
)
def test_wrong_arguments_raise(source: list, seq_len: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_clients(source, seq_len=seq_len)


@pytest.mark.parametrize("by", ["q", "client", "example"])
def test_an_example_of_files_is_named_by_its_place_in_its_file(tmp_path: Path, by: str) -> None:
    """Not by its place among the examples that a hash leaves, sorted by client."""
    field = Conversation("q", "r")
    for name in ("b", "a"):
        lines = [json.dumps({"q": f"{name}{k}", "r": "x" if k != 7 else None}) for k in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n" * 2)
    readers = [
        lambda source: pack_clients(source, seq_len=64, field=field),
        lambda source: heldout_token_batches(source, batch_size=1, seq_len=64, field=field),
        lambda source: next(
            token_rounds(source, islands=1, local_steps=1, batch_size=9, seq_len=64, field=field)
        ),
    ]
    named = 0
    for split in ("train", "heldout"):
        source = load(tmp_path / "*.jsonl", split, heldout_fraction=0.5, heldout_by=by)
        if any(example["r"] is None for example in source):
            for read in readers:
                with pytest.raises(
                    ValueError, match=r"^Example 7 of \S*/[ab].jsonl, counted from 0"
                ):
                    read(source.select(["q", "r"]))
                named += 1
    assert named

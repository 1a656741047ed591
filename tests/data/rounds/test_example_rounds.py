import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import ExampleRounds, Source, example_rounds, partition_by_field, read_examples

SIZES: dict[str, Any] = {"clients": 3, "local_steps": 2, "batch": 4}


def numbered(count: int) -> list[dict[str, Any]]:
    """Images that say which they are: example n is n / 255 everywhere, its label n."""
    return [{"image": np.full((2, 2, 1), n, np.uint8), "label": np.int64(n)} for n in range(count)]


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in ("image", "label"))


def test_a_round_has_images_of_the_digits(digits: Callable[[str], Source]) -> None:
    source = digits("train")
    batches = next(example_rounds(source, clients=5, local_steps=2, batch=3))
    assert batches["image"].shape == (5, 2, 3, 8, 8, 1)
    assert batches["label"].shape == (5, 2, 3)
    assert (batches["image"].dtype, batches["label"].dtype) == (np.float32, np.int32)
    assert batches["image"].min() == 0.0
    assert batches["image"].max() == 1.0
    known = {(x["image"].tobytes(), int(x["label"])) for x in source}
    images = np.rint(batches["image"] * 255).astype(np.uint8).reshape(-1, 8, 8, 1)
    for image, label in zip(images, batches["label"].ravel(), strict=True):
        assert (image.tobytes(), label) in known


@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_every_epoch_of_a_client_has_its_examples_once(
    clients: int, steps: int, batch: int, seed: int
) -> None:
    rounds = example_rounds(
        numbered(20), clients=clients, local_steps=steps, batch=batch, seed=seed
    )
    labels = np.concatenate([next(rounds)["label"].reshape(clients, -1) for _ in range(40)], axis=1)
    seen: set[int] = set()
    for client, size in enumerate(rounds.examples_per_client):
        epochs = labels[client][: len(labels[client]) // size * size].reshape(-1, size)
        for epoch in epochs:
            assert Counter(epoch.tolist()) == Counter(epochs[0].tolist())
            assert len(set(epoch.tolist())) == size
        if size > 4:
            assert len({epoch.tobytes() for epoch in epochs}) > 1
        if len(epochs):
            assert not seen & set(epochs[0].tolist())
            seen |= set(epochs[0].tolist())
    assert rounds.examples_per_client.sum() == 20


def test_images_and_labels_stay_together() -> None:
    batches = next(example_rounds(numbered(200), **SIZES))
    assert np.array_equal(np.rint(batches["image"][..., 0, 0, 0] * 255), batches["label"])


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_restored_stream_goes_on_bitwise(before: int, between: int) -> None:
    stream, other = (example_rounds(numbered(17), **SIZES) for _ in "ab")
    for _ in range(before):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(3)]
    for _ in range(between):
        next(other)
    for restored in (stream, other):
        restored.set_state(state)
        assert all(same(batches, next(restored)) for batches in following)


def test_the_seed_decides() -> None:
    def make(seed: int) -> ExampleRounds:
        return example_rounds(numbered(50), **SIZES, seed=seed)

    assert same(next(make(1)), next(make(1)))
    assert not same(next(make(1)), next(make(2)))


def test_a_partition_by_label(digits: Callable[[str], Source]) -> None:
    source = digits("train")
    partition = partition_by_field(source, "label", 5)
    rounds = example_rounds(source, clients=5, local_steps=10, batch=20, partition=partition)
    for client, labels in enumerate(next(rounds)["label"]):
        own = {int(source[int(index)]["label"]) for index in partition[client]}
        assert set(labels.ravel().tolist()) == own
        assert len(own) == 2


def test_read_examples_keeps_floating_numbers(rng: np.random.Generator) -> None:
    images = rng.normal(size=(5, 3, 3, 1)).astype(np.float32)
    source = [{"image": x, "label": k} for k, x in enumerate(images)]
    arrays = read_examples(source)
    assert np.array_equal(arrays["image"], images)
    assert arrays["label"].tolist() == [0, 1, 2, 3, 4]


def test_read_examples_of_the_test_split(digits: Callable[[str], Source]) -> None:
    arrays = read_examples(digits("test"))
    assert arrays["image"].shape == (len(digits("test")), 8, 8, 1)
    assert set(arrays["label"].tolist()) == set(range(10))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch is 0, but must be at least 1"):
        example_rounds(numbered(5), **{**SIZES, "batch": 0})
    with pytest.raises(ValueError, match="GiB of memory: make one of them smaller"):
        example_rounds(numbered(5), **{**SIZES, "batch": 10**12})
    with pytest.raises(ValueError, match="5 examples cannot be shared among 6 participants"):
        example_rounds(numbered(5), **{**SIZES, "clients": 6})
    with pytest.raises(ValueError, match="has no examples: load another split"):
        example_rounds([], **SIZES)
    with pytest.raises(KeyError, match="no field 'digit', but 'image', 'label'"):
        example_rounds(numbered(5), **SIZES, label="digit")
    ragged = [{"image": np.zeros((n, 2, 1), np.uint8), "label": n} for n in (2, 3, 4)]
    with pytest.raises(ValueError, match="3 shapes, such as"):
        example_rounds(ragged, **SIZES)
    with pytest.raises(ValueError, match="clients is 3 and was 2"):
        state = example_rounds(numbered(5), **{**SIZES, "clients": 2}).get_state()
        example_rounds(numbered(5), **SIZES).set_state(state)

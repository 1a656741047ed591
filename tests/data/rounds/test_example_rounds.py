import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import chex
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import (
    ClientSampler,
    ExampleRounds,
    Source,
    cohort_rounds,
    example_rounds,
    partition_by_field,
    read_examples,
)

SIZES: dict[str, Any] = {"num_clients": 3, "local_steps": 2, "batch_size": 4}


def numbered(count: int) -> list[dict[str, Any]]:
    """Make images that identify themselves: example n is n / 255 everywhere, its label n."""
    return [{"image": np.full((2, 2, 1), n, np.uint8), "label": np.int64(n)} for n in range(count)]


def test_a_round_has_images_and_labels_of_the_digits(digits: Callable[[str], Source]) -> None:
    source = digits("train")
    batches = next(example_rounds(source, num_clients=5, local_steps=2, batch_size=3)).batches
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
        numbered(20), num_clients=clients, local_steps=steps, batch_size=batch, seed=seed
    )
    labels = np.concatenate(
        [next(rounds).batches["label"].reshape(clients, -1) for _ in range(40)], axis=1
    )
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


def test_images_keep_their_labels() -> None:
    batches = next(example_rounds(numbered(200), **SIZES)).batches
    assert np.array_equal(np.rint(batches["image"][..., 0, 0, 0] * 255), batches["label"])


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_restored_stream_continues_bitwise(before: int, between: int) -> None:
    stream, other = (example_rounds(numbered(17), **SIZES) for _ in "ab")
    for _ in range(before):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(3)]
    for _ in range(between):
        next(other)
    for restored in (stream, other):
        restored.set_state(state)
        for cohort in following:
            chex.assert_trees_all_equal(next(restored), cohort)


def test_the_seed_determines_the_rounds() -> None:
    def make(seed: int) -> ExampleRounds:
        return example_rounds(numbered(50), **SIZES, seed=seed)

    chex.assert_trees_all_equal(next(make(1)), next(make(1)))
    labels = [next(make(seed)).batches["label"] for seed in (1, 2)]
    assert not np.array_equal(*labels)


def test_clients_have_the_labels_of_their_partition(digits: Callable[[str], Source]) -> None:
    source = digits("train")
    partition = partition_by_field(source, "label", 5)
    rounds = example_rounds(
        source, num_clients=5, local_steps=10, batch_size=20, partition=partition
    )
    for client, labels in enumerate(next(rounds).batches["label"]):
        own = {int(source[int(index)]["label"]) for index in partition[client]}
        assert set(labels.ravel().tolist()) == own
        assert len(own) == 2


def test_read_examples_does_not_scale_floats(rng: np.random.Generator) -> None:
    images = rng.normal(size=(5, 3, 3, 1)).astype(np.float32)
    source = [{"image": x, "label": k} for k, x in enumerate(images)]
    arrays = read_examples(source)
    assert np.array_equal(arrays["image"], images)
    assert arrays["label"].tolist() == [0, 1, 2, 3, 4]


def test_read_examples_of_the_test_split(digits: Callable[[str], Source]) -> None:
    arrays = read_examples(digits("test"))
    assert arrays["image"].shape == (len(digits("test")), 8, 8, 1)
    assert set(arrays["label"].tolist()) == set(range(10))


def test_bad_arguments_raise() -> None:
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        example_rounds(numbered(5), **{**SIZES, "batch_size": 0})
    with pytest.raises(ValueError, match="GiB of memory: reduce one of these sizes"):
        example_rounds(numbered(5), **{**SIZES, "batch_size": 10**12})
    with pytest.raises(ValueError, match="5 examples are too few for 6 participants"):
        example_rounds(numbered(5), **{**SIZES, "num_clients": 6})
    with pytest.raises(ValueError, match="has no examples: load another split"):
        example_rounds([], **SIZES)
    with pytest.raises(KeyError, match="no field 'digit', but 'image', 'label'"):
        example_rounds(numbered(5), **SIZES, label_field="digit")
    ragged = [{"image": np.zeros((n, 2, 1), np.uint8), "label": n} for n in (2, 3, 4)]
    with pytest.raises(ValueError, match="3 shapes, such as"):
        example_rounds(ragged, **SIZES)
    with pytest.raises(ValueError, match="num_clients is 3 and was 2"):
        state = example_rounds(numbered(5), **{**SIZES, "num_clients": 2}).get_state()
        example_rounds(numbered(5), **SIZES).set_state(state)


def test_a_round_counts_examples_and_names_all_clients() -> None:
    rounds = example_rounds(numbered(50), **SIZES)
    cohort = next(rounds)
    assert rounds.items_per_round == cohort.batches["label"].size == 3 * 2 * 4
    assert rounds.item_unit == "examples"
    assert cohort.num_examples.tolist() == rounds.examples_per_client.tolist() == [17, 17, 16]
    assert cohort.client_ids.tolist() == [0, 1, 2]


IMAGES = np.random.default_rng(1).integers(0, 256, (4, 2, 2, 1), np.uint8)
READERS: dict[str, Callable[..., Any]] = {
    "read_examples": lambda images, labels: read_examples({"image": images, "label": labels}),
    "example_rounds": lambda images, labels: (
        next(
            example_rounds(
                {"image": images, "label": labels}, num_clients=2, local_steps=1, batch_size=2
            )
        ).batches
    ),
    "cohort_rounds": lambda images, labels: (
        next(
            cohort_rounds(
                {"image": images, "label": labels},
                [np.arange(2), np.arange(2, 4)],
                ClientSampler(2, 2),
                batch_size=2,
            )
        ).batches
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_images_and_labels_of_other_dtypes_keep_their_values(name: str) -> None:
    read, labels = READERS[name], np.array([0, 3, 1, 2])
    wanted = read(IMAGES, labels)
    for image_dtype in ("int64", ">u2", "float64", "uint32"):
        scale = 255 if image_dtype == "float64" else 1
        for label_dtype in ("float32", "uint8", ">i8", "uint64"):
            content = read(
                IMAGES.astype(image_dtype) / scale if scale > 1 else IMAGES.astype(image_dtype),
                labels.astype(label_dtype),
            )
            assert content["image"].dtype == np.float32 and content["label"].dtype == np.int32
            np.testing.assert_allclose(content["image"], wanted["image"], rtol=1e-6)
            np.testing.assert_array_equal(content["label"], wanted["label"])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            np.linspace(0.1, 1, 4),
            r"'label' has the value 0\.\d+ \(float64\), expected integers from",
        ),
        (np.array([np.nan] * 4), r"'label' has the value nan \(float64\)"),
        (np.array([-np.inf] * 4), r"'label' has the value -inf"),
        (np.full(4, 2**32 - 1, np.uint32), r"'label' has the value 4294967295 \(uint32\)"),
        (np.full(4, 2**33), r"'label' has the value 8589934592 \(int64\)"),
        (np.array([*"abcd"]), r"'label' has dtype <U1 and values such as '[abcd]'.*np\.unique"),
        (np.array([None] * 4), r"'label' has dtype object and values such as None"),
    ],
)
def test_a_label_that_is_not_a_class_is_named(name: str, labels: Any, words: str) -> None:
    error = TypeError if "dtype" in words else ValueError
    with pytest.raises(error, match=rf"^The field {words}.*preprocess"):
        READERS[name](IMAGES, labels)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("images", "words"),
    [
        (IMAGES.astype(np.uint16) + 256, r"has the value \d+ \(uint16\), expected .* 0 to 255"),
        (IMAGES.astype(np.int32) - 300, r"has the value -\d+ \(int32\), expected .* 0 to 255"),
        (np.full(IMAGES.shape, 1e39), r"has the value 1e\+39 \(float64\), expected numbers"),
        (IMAGES * 1j, r"has dtype complex128, expected real numbers"),
        (IMAGES.astype(str), r"has dtype <U\d+ and values such as"),
    ],
)
def test_an_image_that_is_not_pixels_is_named(name: str, images: Any, words: str) -> None:
    error = TypeError if "dtype" in words else ValueError
    with pytest.raises(error, match=rf"^The field 'image' {words}.*preprocess"):
        READERS[name](images, np.arange(4))


def test_a_field_of_preprocess_that_jax_cannot_hold_is_named() -> None:
    def hashed(fields: Any) -> dict[str, Any]:
        return {"ids": fields["label"] + 2**40, "image": fields["image"]}

    with pytest.raises(
        ValueError, match=r"The field 'ids' after preprocess \(.*hashed\) has the v"
    ):
        cohort_rounds(
            {"image": IMAGES, "label": np.arange(4)},
            [np.arange(4)],
            ClientSampler(1, 1),
            batch_size=2,
            preprocess=hashed,
        )

"""Random rows of the archives of federated data sets."""

from typing import Any

import numpy as np
from federated_archives import Fields, serialize

from fedpax.sources import federated_sources

# By data set: each split's name in TFDS and in the archive.
SPLITS = {
    "federated_emnist/all": {"train": "all_train", "test": "all_test"},
    "federated_emnist/digits": {"train": "digits_only_train", "test": "digits_only_test"},
    "federated_shakespeare": {"train": "train", "test": "test"},
    "federated_stackoverflow": {"train": "train", "heldout": "heldout", "test": "test"},
    "federated_cifar100": {"train": "train", "test": "test"},
}
# Sorted by code points; every other order (by length, case or locale) changes them.
CLIENTS = {"0": 5, "10": 1, "2": 9, "THE_PLAY_ROLE": 3, "f0000_14": 2, "é f": 4}


def builder_of(name: str) -> Any:
    class_name = "".join(part.capitalize() for part in name.partition("/")[0].split("_"))
    return getattr(federated_sources, class_name)


def random_example(name: str, rng: np.random.Generator) -> tuple[Fields, Fields]:
    """Return an example as the archive stores it, and as the source must return it."""
    text = lambda: rng.bytes(int(rng.integers(0, 40)))
    match name.partition("/")[0]:
        case "federated_emnist":
            image = rng.integers(0, 256, (28, 28, 1), np.uint8)
            label = int(rng.integers(0, 10 if "digits" in name else 62))
            noise = rng.uniform(-0.4, 0.4, 28 * 28)  # so that only rounding gives the right byte
            pixels = np.clip((image.ravel() + noise) / 255, 0, 1).astype(np.float32)
            return {"pixels": pixels, "label": label}, {"image": image, "label": label}
        case "federated_shakespeare":
            snippet = text()
            return {"snippets": snippet}, {"text": snippet}
        case "federated_stackoverflow":
            fields = {key: text() for key in ("creation_date", "tags", "title", "type")}
            fields["score"] = int(rng.integers(-(2**40), 2**40))
            tokens = text()
            return {**fields, "tokens": tokens}, {**fields, "text": tokens}
        case _:
            image = rng.integers(0, 256, (32, 32, 3), np.uint8)
            labels = {"label": int(rng.integers(100)), "coarse_label": int(rng.integers(20))}
            return {"image": image.ravel().astype(np.int64), **labels}, {"image": image, **labels}


def random_rows(
    name: str, rng: np.random.Generator
) -> tuple[list[tuple[str, str, bytes]], dict[str, list[Fields]]]:
    """Return rows in random order, and each split's expected examples, sorted by client."""
    rows, expected = [], {}
    for split, archive_split in SPLITS[name].items():
        holders = [client for client, count in CLIENTS.items() for _ in range(count)]
        rng.shuffle(holders)
        examples = []
        for client in holders:
            written, read = random_example(name, rng)
            rows.append((archive_split, client, serialize(written)))
            examples.append({**read, "client": client.encode()})
        expected[split] = sorted(examples, key=lambda example: example["client"])
    return rows, expected

"""Rounds of labelled examples: an endless stream of classification batches, a shard a client.

Each client goes through its own examples again and again, in a new order each time. What a round
holds depends on the settings and the round's number alone, so a state is that number.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import Cohort
from fedpax.data.populations.partition import (
    Examples,
    Partition,
    check_partition,
    get_field,
    partition_checksum,
    partition_iid,
)
from fedpax.data.rounds.stream import check_sizes, check_state, source_name
from fedpax.data.shuffle import hash_key, shuffled_index

Arrays = dict[str, NDArray[Any]]
"""``image``: float32 [..., height, width, channels]; ``label``: int32 [...]."""


def read_examples(source: Examples, *, image: str = "image", label: str = "label") -> Arrays:
    """Reads all examples of a source, as to evaluate on them.

    Args:
        source: labelled images; a source that ``load`` returned, or a list of dicts.
        image: the field of an example that holds the image.
        label: the field that holds the label.

    Returns:
        ``image``: float32 [examples, ...]; integers from 0 to 255 become 0 to 1, floating
        numbers stay as they are. ``label``: int32 [examples].

    Raises:
        ValueError: if the source has no examples, or their shapes differ.

    Example:
        >>> images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
        >>> arrays = read_examples([{"image": x, "label": k} for k, x in enumerate(images)])
        >>> arrays["image"].shape, arrays["image"].dtype, arrays["label"].tolist()
        ((3, 8, 8, 1), dtype('float32'), [0, 1, 2])
    """
    images, labels = _read(source, image, label)
    return {"image": scale(images), "label": labels}


def example_batches(examples: Arrays, batch: int) -> list[Arrays]:
    """Cuts examples into batches to evaluate on; the last is filled up with what does not count.

    Args:
        examples: arrays [examples, ...], as ``read_examples`` returns them.
        batch: examples in a batch.

    Returns:
        For each batch the fields, [batch, ...], and ``mask``, float32 [batch], 0 for filling.

    Raises:
        ValueError: if ``batch`` is below 1.

    Example:
        >>> batches = example_batches({"label": np.arange(5)}, 3)
        >>> [b["label"].tolist() for b in batches], batches[1]["mask"].tolist()
        ([[0, 1, 2], [3, 4, 0]], [1.0, 1.0, 0.0])
    """
    check_sizes(1, batch=batch)
    count = len(next(iter(examples.values())))
    places = np.arange(-(-count // batch) * batch).reshape(-1, batch)
    return [
        {name: values[place % count] for name, values in examples.items()}
        | {"mask": (place < count).astype(np.float32)}
        for place in places
    ]


class ExampleRounds:
    """An endless iterator over rounds of labelled images, as ``example_rounds`` makes it.

    Attributes:
        examples_per_client: int64 [clients], the weights of a weighted mean over clients.
        settings: what decides the stream; a state is restored only into the same.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[np.int32],
        partition: list[NDArray[np.int64]],
        settings: dict[str, int | str],
    ) -> None:
        self._images, self._labels = images, labels
        self.examples_per_client = np.array([len(held) for held in partition], np.int64)
        # All clients' indices end to end, and where each client's begin.
        self._indices = np.concatenate(partition)
        self._begins = np.cumsum(self.examples_per_client) - self.examples_per_client
        self.settings = settings
        self._round = 0

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def __next__(self) -> Cohort:
        """Returns the next round, in arrays of its own."""
        clients, steps, batch = (
            int(self.settings[name]) for name in ("clients", "local_steps", "batch")
        )
        # The places of this round's examples in each client's endless sequence.
        place = np.arange(self._round * steps * batch, (self._round + 1) * steps * batch)
        sizes = self.examples_per_client[:, None]
        epoch, place = place // sizes, place % sizes  # [clients, steps * batch]
        keys = hash_key(int(self.settings["seed"]), np.arange(clients)[:, None], epoch)
        chosen = self._indices[self._begins[:, None] + shuffled_index(place, sizes, keys)]
        chosen = chosen.reshape(clients, steps, batch)
        self._round += 1
        batches = {"image": scale(self._images[chosen]), "label": self._labels[chosen]}
        return Cohort(batches, num_examples=self.examples_per_client.astype(np.int32))

    def get_state(self) -> dict[str, Any]:
        """Returns where the stream stands, after the last round that it gave, for JSON."""
        return {"settings": dict(self.settings), "round": self._round}

    def set_state(self, state: Any) -> None:
        """Goes to where a stream stood: the next rounds are bitwise those that followed there.

        Args:
            state: what ``get_state`` returned, in this process or another, of a stream that was
                made with the same settings over the same source.

        Raises:
            ValueError: if the state is of another stream, saying what differs.
        """
        self._round = int(check_state(state, self.settings, "round"))


def example_rounds(
    source: Examples,
    *,
    clients: int,
    local_steps: int,
    batch: int,
    seed: int = 0,
    partition: Partition | None = None,
    image: str = "image",
    label: str = "label",
) -> ExampleRounds:
    """Makes an endless stream of classification rounds from a source of labelled images.

    The examples are read once, through grain, and held in memory. A client with fewer examples
    than it needs for a round begins again with a new order.

    Args:
        source: labelled images; a source that ``load`` returned, or a list of dicts.
        clients: how many clients share the examples.
        local_steps: steps of a client in a round.
        batch: examples in a step of a client.
        seed: chooses the default partition and all orders.
        partition: the examples of each client, as the functions ``partition_...`` return; by
            default ``partition_iid``.
        image: the field of an example that holds the image.
        label: the field that holds the label.

    Returns:
        An iterator. Each item is a `fedpax.Cohort`. Its batches have ``image``, float32 [clients,
        local_steps, batch, ...] (integers from 0 to 255 become 0 to 1), and ``label``, int32
        [clients, local_steps, batch]; its ``num_examples`` are the clients' numbers of examples.

    Raises:
        ValueError: for sizes that are not positive or do not fit the memory, fewer examples than
            clients, or a partition that does not fit.

    Example:
        >>> images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), np.uint8)
        >>> source = [{"image": x, "label": k} for k, x in enumerate(images)]
        >>> rounds = example_rounds(source, clients=3, local_steps=2, batch=4)
        >>> cohort = next(rounds)
        >>> cohort.batches["image"].shape, cohort.batches["label"].shape
        ((3, 2, 4, 8, 8, 1), (3, 2, 4))
        >>> cohort.num_examples.tolist()
        [4, 3, 3]
    """
    images, labels = _read(source, image, label)
    sizes = {"clients": clients, "local_steps": local_steps, "batch": batch}
    check_sizes(4 * images[0].size, **sizes)
    if partition is None:
        partition = partition_iid(len(source), clients, seed=seed)
    partition = check_partition(partition, clients, len(source), "clients")
    settings: dict[str, int | str] = {
        "source": source_name(source),
        "examples": len(source),
        **sizes,
        "seed": seed,
        "partition": partition_checksum(partition),
        "image": image,
        "label": label,
    }
    return ExampleRounds(images, labels, partition, settings)


def _read(source: Examples, image: str, label: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    import grain  # here, as it takes longer to import than everything else

    if not len(source):
        raise ValueError("The source has no examples: load another split.")
    images, labels = [], []
    examples = grain.MapDataset.source(source)
    for index in range(len(examples)):  # iterating would start 16 threads, and be slower
        example = examples[index]
        images.append(np.asarray(get_field(example, image)))
        labels.append(np.asarray(get_field(example, label)))
    if len(shapes := {x.shape for x in images}) > 1:
        raise ValueError(
            f"The images of {source_name(source)} have {len(shapes)} shapes, such as "
            f"{' and '.join(map(str, sorted(shapes)[:2]))}, and cannot be stacked: resize them "
            "when the data set is prepared."
        )
    return np.stack(images), np.stack(labels).astype(np.int32)


def scale(images: NDArray[Any]) -> NDArray[np.float32]:
    """Brings integers from 0 to 255 to 0 to 1, float32; floating numbers stay as they are."""
    largest = 255 if np.issubdtype(images.dtype, np.integer) else 1
    return images.astype(np.float32) / np.float32(largest)

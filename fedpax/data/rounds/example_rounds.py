"""An endless stream of labeled images for a fixed set of clients, each in an order of its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32, Num

from fedpax.clients.cohort import Cohort
from fedpax.data.rounds.labeled_examples import read_raw, scale_pixels
from fedpax.data.rounds.stream_parts import (
    arrays_fingerprint,
    check_sizes,
    check_state,
    source_name,
)
from fedpax.populations.client_arrays import RaggedPartition
from fedpax.populations.partition import (
    Partition,
    check_partition,
    partition_checksum,
    partition_iid,
)
from fedpax.primitives.casts import checked_cast
from fedpax.sources.shuffle import hash_key, shuffled_index
from fedpax.sources.source import Examples, as_examples


class ExampleRounds:
    """An endless iterator over rounds of labeled images; made by `example_rounds`.

    Attributes:
        examples_per_client: int64 `[clients]`, the number of examples of each client.
        num_clients: the number of clients: `client_ids` are below it.
        items_per_round: the number of examples in a round, over all clients.
        item_unit: `"examples"`.
        settings: the settings that a stream must have to restore a state of this one.
    """

    item_unit = "examples"

    def __init__(
        self,
        images: Num[np.ndarray, "examples height width channels"],
        labels: Int32[np.ndarray, " examples"],
        partition: RaggedPartition,
        settings: dict[str, int | str],
    ) -> None:
        self._images, self._labels = images, labels
        self.examples_per_client = partition.sizes()
        # The concatenated indices of all clients, and the position of each client's first.
        self._indices = partition.indices
        self._starts = partition.starts[:-1]
        self.settings = settings
        self._shape = tuple(
            int(settings[name]) for name in ("num_clients", "local_steps", "batch_size")
        )
        self.num_clients = self._shape[0]
        self.items_per_round = int(np.prod(self._shape))
        self._round = 0

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def fingerprint(self) -> dict[str, str]:
        """Return the size of the data and a checksum of a sample, by name."""
        sample = arrays_fingerprint({"image": self._images, "label": self._labels})
        return {str(self.settings["source"]): f"{len(self._labels)} examples, {sample}"}

    def __next__(self) -> Cohort:
        num_clients, steps, batch_size = self._shape
        per_round = steps * batch_size
        # The positions of this round's examples in each client's endless sequence.
        position = np.arange(self._round * per_round, (self._round + 1) * per_round)
        sizes = self.examples_per_client[:, None]
        epoch, position = position // sizes, position % sizes  # [clients, steps * batch]
        keys = hash_key(int(self.settings["seed"]), np.arange(num_clients)[:, None], epoch)
        chosen = self._indices[self._starts[:, None] + shuffled_index(position, sizes, keys)]
        chosen = chosen.reshape(self._shape)
        self._round += 1
        return Cohort(
            {"image": scale_pixels(self._images[chosen]), "label": self._labels[chosen]},
            num_examples=checked_cast(self.examples_per_client, np.int32, "num_examples"),
            client_ids=np.arange(num_clients, dtype=np.int32),
        )

    def get_state(self) -> dict[str, Any]:
        """Return the stream's position after the last round, as JSON values."""
        return {"settings": dict(self.settings), "round": self._round}

    def set_state(self, state: Any) -> None:
        """Move to a saved position; the following rounds are bitwise equal."""
        self._round = int(check_state(state, self.settings, "round"))


def example_rounds(
    source: Examples,
    *,
    num_clients: int,
    local_steps: int,
    batch_size: int,
    seed: int = 0,
    partition: Partition | None = None,
    image_field: str = "image",
    label_field: str = "label",
) -> ExampleRounds:
    """Make an endless stream of rounds of labeled images in which every client takes part.

    All batches are full: a client with fewer examples than a round needs starts its next epoch, in
    a new order, within the round.

    Args:
        source: labeled images: a source from `load`, a list of dicts, a dict of columns, or a data
            frame.
        num_clients: the number of clients.
        local_steps: steps per client and round.
        batch_size: examples per step and client.
        seed: the random seed of the default partition and of all orders.
        partition: the indices of each client's examples, as `partition_...` returns them. Default
            None: `partition_iid`.
        image_field: the field with the image.
        label_field: the field with the label.

    Returns:
        An iterator over `fedpax.Cohort`:

        - `batches["image"]`: float32 `[clients, local_steps, batch_size, ...]`; integers are scaled
          from 0 to 255 to 0 to 1;
        - `batches["label"]`: int32 `[clients, local_steps, batch_size]`;
        - `num_examples`: int32 `[clients]`, the number of examples that each client has;
        - `client_ids`: int32 `[clients]`, 0 to `num_clients` - 1.

    Raises:
        KeyError: the examples have no such field.
        TypeError: `source` is something else, or an image or label is not numbers.
        ValueError: a size is below 1 or does not fit the memory, the number of clients or the
            partition does not fit the source, an integer of an image is outside 0 to 255, or a
            label is not an integer within int32.

    Example:
        >>> images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), np.uint8)
        >>> source = [{"image": x, "label": k} for k, x in enumerate(images)]
        >>> rounds = example_rounds(source, num_clients=3, local_steps=2, batch_size=4)
        >>> cohort = next(rounds)
        >>> cohort.batches["image"].shape, cohort.batches["label"].shape
        ((3, 2, 4, 8, 8, 1), (3, 2, 4))
        >>> cohort.num_examples.tolist()
        [4, 3, 3]
    """
    source = as_examples(source)
    images, labels = read_raw(source, image_field, label_field)
    sizes = {"num_clients": num_clients, "local_steps": local_steps, "batch_size": batch_size}
    check_sizes(4 * images[0].size, **sizes)
    if partition is None:
        partition = partition_iid(len(source), num_clients, seed=seed)
    partition = check_partition(partition, num_clients, len(source), "clients")
    settings: dict[str, int | str] = {
        "source": source_name(source),
        "num_examples": len(source),
        **sizes,
        "seed": seed,
        "partition": partition_checksum(partition),
        "image_field": image_field,
        "label_field": label_field,
    }
    return ExampleRounds(images, labels, partition, settings)

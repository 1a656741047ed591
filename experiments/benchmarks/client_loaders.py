"""Read the images of a round's clients with fedpax, FedJAX, pfl and Hugging Face's datasets.

    python -m fedpax.experiments.benchmarks.client_loaders --clients=1000

Every library reads the same clients in new arrays, shuffled within a client, in one batch each, as
uint8 images of 28 x 28; fedpax also as float32, and from a prepared folder. CPU times are compared
with a copy of these arrays. A library that is not installed is left out: install `datasets`, and
`fedjax` and `pfl` without their pinned dependencies.
"""

import functools
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.populations.client_arrays import ContiguousClients

Images = NDArray[np.uint8]
Chosen = NDArray[np.int64]


def fedpax_reader(images: Images, cohort: int, dtype: Any = np.uint8) -> Callable[[Chosen], Any]:
    """Return a function that reads a round of fedpax, which samples the clients itself."""
    return _read_rounds(load(_columns(images), client="client"), cohort, dtype)


def prepared_reader(images: Images, cohort: int) -> Callable[[Chosen], Any]:
    """Return a function that reads a round of fedpax from a prepared folder."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "images.npz"), allow_pickle=False, **_columns(images))
        prepared = prepare(Path(folder, "images.npz"), Path(folder, "prepared"), client="client")
        return _read_rounds(prepared.source, cohort, np.uint8)  # its file stays mapped


def _columns(images: Images) -> dict[str, NDArray[Any]]:
    clients, count = images.shape[:2]
    examples = images.reshape(-1, *images.shape[2:])
    return {"client": np.repeat(np.arange(clients), count), "image": examples}


def _read_rounds(source: Any, cohort: int, dtype: Any) -> Callable[[Chosen], Any]:
    clients = ContiguousClients(source.client_starts)
    rounds = cohort_rounds(
        source,
        clients,
        ClientSampler(len(clients), cohort),
        batch_size=int(clients.sizes().max()),
        preprocess=lambda fields: {"image": fields["image"].astype(dtype, copy=False)},
    )
    return lambda chosen: next(rounds).batches["image"]


def fedjax_reader(images: Images, cohort: int) -> Callable[[Chosen], Any]:
    """Return a function that reads clients of FedJAX."""
    fedjax: Any = importlib.import_module("fedjax")
    clients = {b"%06d" % k: {"image": image} for k, image in enumerate(images)}
    data = fedjax.InMemoryFederatedData(clients)
    order = {"batch_size": images.shape[1], "num_epochs": 1, "seed": 0}
    return lambda chosen: [
        batch["image"]
        for _, client in data.get_clients([b"%06d" % k for k in chosen])
        for batch in client.shuffle_repeat_batch(**order)
    ]


def pfl_reader(images: Images, cohort: int) -> Callable[[Chosen], Any]:
    """Return a function that reads users of pfl."""
    dataset: Any = importlib.import_module("pfl.data.dataset")
    federated: Any = importlib.import_module("pfl.data.federated_dataset")
    random, size = np.random.default_rng(0), images.shape[1]

    def make(user: int) -> Any:
        return dataset.Dataset([images[user][random.permutation(size)]], user_id=user)

    def read(chosen: Chosen) -> list[Any]:
        users = iter(chosen.tolist())
        rounds = federated.FederatedDataset(make, lambda: next(users))
        return [batch[0] for user, _ in rounds.get_cohort(len(chosen)) for batch in user.iter(size)]

    return read


def datasets_reader(images: Images, cohort: int) -> Callable[[Chosen], Any]:
    """Return a function that reads rows of Hugging Face's datasets, sorted by client."""
    datasets: Any = importlib.import_module("datasets")
    count, random = images.shape[1], np.random.default_rng(0)
    data = datasets.Dataset.from_dict(
        {"image": images.reshape(-1, *images.shape[2:4])},
        features=datasets.Features({"image": datasets.Array2D(images.shape[2:4], "uint8")}),
    ).with_format("numpy")
    return lambda chosen: [
        data[k * count : (k + 1) * count]["image"][random.permutation(count)] for k in chosen
    ]


FLOATS = "fedpax, as float32"
READERS: dict[str, Callable[[Images, int], Callable[[Chosen], Any]]] = {
    "fedpax": fedpax_reader,
    "fedpax, prepared": prepared_reader,
    FLOATS: functools.partial(fedpax_reader, dtype=np.float32),
    "FedJAX": fedjax_reader,
    "pfl": pfl_reader,
    "Hugging Face datasets": datasets_reader,
}


class ClientLoaders(Benchmark):
    clients: int = option(1000, "clients of a round, of 4 times as many")
    images: int = option(29, "images of a client")
    repetitions: int = option(9, "measurements of each")
    columns = "library {name} | CPU s {seconds:.4f} | copies {ratio:.1f} | note {note}"

    def measure(self) -> Iterator[Row]:
        random = np.random.default_rng(0)
        shape = (4 * self.clients, self.images, 28, 28, 1)
        images = random.integers(0, 256, shape, np.uint8)
        readers = {}
        for name, make in READERS.items():
            try:
                readers[name] = make(images, self.clients)
            except ImportError as error:
                yield Row(name=name, seconds=[], ratio=None, note=f"not installed: {error}")
        seconds: timing.Seconds = {}
        for repetition in range(self.repetitions + 1):
            chosen = random.choice(len(images), self.clients, replace=False)
            sent = {dtype: images[chosen].astype(dtype) for dtype in (np.uint8, np.float32)}
            jobs: dict[Any, Any] = {dtype: array.copy for dtype, array in sent.items()}
            jobs |= {name: functools.partial(read, chosen) for name, read in readers.items()}
            if repetition == 0:  # compiled and cached; checked, and not counted
                for name in readers:
                    size = sum(np.asarray(part).size for part in jobs[name]())
                    assert size == sent[np.uint8].size, name
                continue
            for name, taken in timing.interleaved(jobs, (), 1, "cpu", warmups=0).items():
                seconds.setdefault(name, []).extend(taken)
        for name in readers:
            copied: Any = np.float32 if name == FLOATS else np.uint8
            ratio = timing.paired_ratio(seconds[name], seconds[copied])
            note = f"{sent[copied].nbytes / 1e6:.0f} MB"
            yield Row(name=name, seconds=seconds[name], ratio=ratio, note=note)


main = command(ClientLoaders)

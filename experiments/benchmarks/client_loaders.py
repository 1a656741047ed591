"""Read the images of a round's clients with fedpax, FedJAX, pfl and Hugging Face's datasets.

    python -m fedpax.experiments.benchmarks.client_loaders --clients=1000

Every library reads the same clients in new arrays, shuffled within a client, in one batch each, as
uint8 images of 28 x 28. CPU times of interleaved calls are compared with the time to copy these
arrays. A library that is not installed is left out: use an environment with `fedjax` and `pfl`
(both without their pinned dependencies) and `datasets`.
"""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.data import ClientSampler, cohort_rounds, load
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.populations.contiguous_clients import ContiguousClients

Images = NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    clients: int = option(1000, "clients of a round, of 4 times as many")
    images: int = option(29, "images of a client")
    repetitions: int = option(9, "measurements of each")


def fedpax_reader(images: Images, cohort: int) -> Callable[[NDArray[np.int64]], Any]:
    """Return a function that reads a round of fedpax, which samples the clients itself."""
    clients, count = images.shape[:2]
    flat = images.reshape(-1, *images.shape[2:])
    source: Any = load(
        {"client": np.repeat(np.arange(clients), count), "image": flat}, client="client"
    )
    rounds = cohort_rounds(
        source,
        ContiguousClients(source.client_starts),
        ClientSampler(clients, cohort),
        batch_size=count,
        preprocess=lambda fields: {"image": fields["image"]},
    )
    return lambda chosen: next(rounds).batches["image"]


def fedjax_reader(images: Images, cohort: int) -> Callable[[NDArray[np.int64]], Any]:
    """Return a function that reads clients of FedJAX."""
    fedjax: Any = importlib.import_module("fedjax")
    data = fedjax.InMemoryFederatedData(
        {b"%06d" % k: {"image": own} for k, own in enumerate(images)}
    )
    size = images.shape[1]

    def read(chosen: NDArray[np.int64]) -> list[Any]:
        clients = data.get_clients([b"%06d" % k for k in chosen])
        return [
            batch["image"]
            for _, client in clients
            for batch in client.shuffle_repeat_batch(batch_size=size, num_epochs=1, seed=0)
        ]

    return read


def pfl_reader(images: Images, cohort: int) -> Callable[[NDArray[np.int64]], Any]:
    """Return a function that reads users of pfl."""
    dataset: Any = importlib.import_module("pfl.data.dataset")
    federated: Any = importlib.import_module("pfl.data.federated_dataset")
    random = np.random.default_rng(0)

    def make(user: int) -> Any:
        return dataset.Dataset([images[user][random.permutation(images.shape[1])]], user_id=user)

    def read(chosen: NDArray[np.int64]) -> list[Any]:
        users = iter(chosen.tolist())
        rounds = federated.FederatedDataset(make, lambda: next(users))
        size = images.shape[1]
        return [batch[0] for user, _ in rounds.get_cohort(len(chosen)) for batch in user.iter(size)]

    return read


def datasets_reader(images: Images, cohort: int) -> Callable[[NDArray[np.int64]], Any]:
    """Return a function that reads rows of Hugging Face's datasets, sorted by client."""
    datasets: Any = importlib.import_module("datasets")
    count = images.shape[1]
    feature = datasets.Array2D(images.shape[2:4], "uint8")
    data = datasets.Dataset.from_dict(
        {"image": images.reshape(-1, *images.shape[2:4])},
        features=datasets.Features({"image": feature}),
    ).with_format("numpy")
    random = np.random.default_rng(0)

    def read(chosen: NDArray[np.int64]) -> list[Any]:
        return [
            data[k * count : (k + 1) * count]["image"][random.permutation(count)] for k in chosen
        ]

    return read


READERS = {
    "fedpax": fedpax_reader,
    "FedJAX": fedjax_reader,
    "pfl": pfl_reader,
    "Hugging Face datasets": datasets_reader,
}


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for each library that is installed."""
    random = np.random.default_rng(0)
    shape = (4 * settings.clients, settings.images, 28, 28, 1)
    images = random.integers(0, 256, shape, np.uint8)
    readers = {}
    for name, make in READERS.items():
        try:
            readers[name] = make(images, settings.clients)
        except ImportError as error:
            yield Row(name=name, seconds=[], ratio=[], note=f"not installed: {error}")
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *readers)}
    for repetition in range(settings.repetitions + 1):
        chosen = random.choice(len(images), settings.clients, replace=False)
        sent = images[chosen]
        jobs: dict[str, Callable[[], Any]] = {"copy": sent.copy}
        jobs |= {name: functools.partial(read, chosen) for name, read in readers.items()}
        for name, job in jobs.items():
            started = time.process_time()
            result = job()
            seconds[name].append(time.process_time() - started)
            if repetition == 0 and name != "copy":  # compiled and cached; checked, and not counted
                assert sum(np.asarray(part).size for part in result) == sent.size, name
    for name in readers:
        own, copies = seconds[name][1:], seconds["copy"][1:]
        ratios = [a / b for a, b in zip(own, copies, strict=True)]
        yield Row(name=name, seconds=own, ratio=ratios, note=f"{sent.nbytes / 1e6:.0f} MB")


def _median(values: list[float], form: str) -> str:
    return format(float(np.median(values)), form) if values else ""


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "library": "{name}",
        "CPU s": lambda row: _median(row.seconds, ".4f"),
        "copies": lambda row: _median(row.ratio, ".1f"),
        "": "{note}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure the memory of a coordinator of rounds over sites, by the number of sites.

    python -m fedpax.experiments.benchmarks.site_memory

Real messages reach the coordinator's process over loopback. The sites are threads of one other
process, which send random updates and do not train. Needs Linux.
"""

import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax.aggregators import Aggregator, coordinate_median, krum, mean, trimmed_mean
from fedpax.algorithms import fedavg
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.sites.coordinator_program import cohort_types, divide, expected_arrays
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.secret_terms import TASK as SUM
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_experiment import CoordinatorRun
from fedpax.sites.site_process import identify
from fedpax.training.experiment import Experiment
from fedpax.training.training_config import TrainingConfig
from fedpax.transport.calls import Connection, DisconnectedError, connect
from fedpax.transport.message import Message

SECURE_SUMS = "secure sums"
AGGREGATORS: dict[str, Callable[[], Aggregator]] = {
    "mean": mean,
    "median": coordinate_median,
    "trimmed mean": lambda: trimmed_mean(0.25),
    "krum": lambda: krum(0),
    SECURE_SUMS: mean,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federation(Experiment):
    """FedAvg of one vector with a client at each site, as a coordinator sees it."""

    aggregator: str
    size: int
    own_fields: ClassVar[tuple[str, ...]] = ()

    def _nothing(self, *arguments: Any) -> Mapping[str, Any]:
        return {}

    def _not_called(self, *arguments: Any) -> Any:
        raise NotImplementedError  # sites call these methods, and a coordinator does not

    shared_content = shared_properties = stated_properties = _nothing
    answer = at_site = build = _not_called

    def describe_site(self) -> Mapping[str, Any]:
        return {"clients": 1}

    def agree(self, descriptions: Sequence[Any]) -> Generator[Any, Any, Mapping[str, Any]]:
        yield from ()
        return {}

    def with_inputs(self, inputs: Mapping[str, Any]) -> "Federation":
        return self

    def coordinate(self, num_clients: int) -> CoordinatorRun:
        algorithm = fedavg(
            lambda params, batch: (jnp.sum(params * batch["x"]), {}),
            cohort_size=num_clients,
            client_optimizer=optax.sgd(0.1),
            aggregator=AGGREGATORS[self.aggregator](),
        )
        clients = list(range(num_clients))
        return CoordinatorRun(
            algorithm, lambda key: jnp.zeros(self.size), num_clients, lambda *_: clients
        )


class SiteMemory(Benchmark):
    sites: list[int] = option("4,64", "numbers of sites", harness.integers)
    megabytes: float = option(16.0, "size of the model")
    rounds: int = option(2, "rounds")
    aggregators: list[str] | None = harness.some(",", lambda _: AGGREGATORS)
    columns = "aggregator {aggregator:<12} | sites {sites:>5} | peak MB {megabytes:,.0f}"

    def measure(self) -> Iterator[Row]:
        for name, sites in itertools.product(self.aggregators or AGGREGATORS, self.sites):
            yield Row(aggregator=name, sites=sites, megabytes=self._peak(name, sites) / 1e6)

    def _peak(self, aggregator: str, sites: int) -> float:
        training = TrainingConfig(rounds=self.rounds, evaluate_every=0, checkpoint_every=0)
        size = int(self.megabytes * 1e6 / 4)
        experiment = Federation(training=training, aggregator=aggregator, size=size)
        update = np.random.default_rng(0).random(size, np.float32)
        with (
            timing.new_folder() as folder,
            timing.in_process(_coordinate, experiment, folder, sites) as pipe,
        ):
            address, identity = pipe.recv()
            with connect(address) as connection, ThreadPoolExecutor(sites) as pool:
                names = [f"site{i}" for i in range(sites)]
                send = functools.partial(_send, connection, experiment, identity, update)
                list(pool.map(send, names))
            peak: float = pipe.recv()
        return peak


def _coordinate(pipe: Pipe, experiment: Federation, folder: Path, sites: int) -> None:
    """Run the coordinator, and send its port and in the end its memory."""
    address = f"127.0.0.1:{timing.free_port()}"
    pipe.send((address, identify(experiment, {}, {})._asdict()))
    rules = RoundRules(sites, 600.0, secure_sums=experiment.aggregator == SECURE_SUMS)
    run_coordinator(experiment, folder, address, rules=rules, goodbye_seconds=60.0)
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text("utf-8")
    pipe.send(1024.0 * int(status.split("VmHWM:")[1].split()[0]))


def _send(
    connection: Connection,
    experiment: Federation,
    identity: Mapping[str, Any],
    update: np.ndarray,
    name: str,
) -> None:
    """Answer a coordinator's tasks with one update until the run is finished."""
    incarnation, known, replies = secrets.token_hex(8), False, dict[int, Any]()
    sums = SecretTerms(name)

    def call(kind: str, arrays: Mapping[str, np.ndarray] | None = None, **fields: Any) -> Message:
        header = {"kind": kind, "site": name, "incarnation": incarnation, **fields}
        deadline = time.monotonic() + 60.0
        while True:
            try:
                return connection.call(Message(header, arrays or {}), 300.0)
            except DisconnectedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    call("join", identity=identity, run=None, description={"clients": 1})
    inputs: Any = None
    while (answer := call("work", inputs=known, have=None)).header["status"] != "finished":
        task = answer.header
        if task["status"] == "inputs":
            inputs = task["inputs"]
            call("ready", types={"x": ["float32", [1]]})
            known = True
        if task["status"] != "task":
            continue
        place = {"token": task["token"], "stage": task["stage"]}
        if task["task"] == "evaluate":
            call("reply", fields={"metrics": {}, "examples": 0}, **place)
            continue
        if task["task"] == SUM:
            call("reply", fields=sums.answer(task), **place)
            continue
        replies = replies or _replies(experiment, task["num_clients"], update)
        while call("offer").header["status"] == "later":
            time.sleep(0.2)
        asked = {**task, "inputs": inputs}
        fields, arrays = sums.send(asked, answer.arrays, {"examples": 1}, replies[task["stage"]])
        call("reply", arrays, fields=fields, **place)


def _replies(experiment: Federation, clients: int, update: np.ndarray) -> dict[int, Any]:
    def reply(sizes: Sequence[int | None], dtype: Any) -> np.ndarray:
        shape = [1 if size is None else size for size in sizes]
        return update.reshape(shape) if np.prod(shape) == update.size else np.ones(shape, dtype)

    run = experiment.coordinate(clients)
    state = jax.eval_shape(lambda: run.algorithm.init(run.init(jax.random.key(0))))
    divided = divide(run.algorithm, state, cohort_types({"x": ["float32", [1]]}, clients), None)
    expected = enumerate(map(expected_arrays, divided))
    return {n: {name: reply(*of) for name, of in arrays.items()} for n, arrays in expected}


main = command(SiteMemory)

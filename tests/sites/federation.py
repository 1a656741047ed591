"""A federation in one process: the coordinator and its sites, with real messages between them."""

import contextlib
import csv
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.run_files.metrics import MetricsWriter
from fedpax.sites.coordinator_rounds import Coordinator
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_files import read_federation
from fedpax.sites.site_process import identify
from fedpax.sites.site_table import SiteTable
from fedpax.sites.take_part import Site
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import new_token
from fedpax.training.progress import Progress
from fedpax.transport.message import Message, decode, encode

LIMIT = 1 << 30
_SAVING = threading.Lock()


class OneOfSeveral(Site):
    """A site of a process that has several: Orbax saves one at a time."""

    def _save(self, *what: Any) -> None:
        with _SAVING:
            super()._save(*what)


class Line:
    """A connection that encodes messages, and keeps their bytes."""

    address = "memory"

    def __init__(self, exchange: TaskExchange) -> None:
        self._exchange, self.sent, self.received = exchange, [], []

    def call(self, message: Message, timeout: float) -> Message:
        """Call the coordinator."""
        chunks = list(encode(message, LIMIT))
        self.sent.append(b"".join(chunks))
        answer = list(encode(self._exchange.handle("", decode(chunks, LIMIT)), LIMIT))
        self.received.append(b"".join(answer))
        return decode(answer, LIMIT)


class Changed(Line):
    """A line that changes what a site sends."""

    def __init__(self, exchange: TaskExchange, change: Any) -> None:
        super().__init__(exchange)
        self._change = change

    def call(self, message: Message, timeout: float) -> Message:
        """Call the coordinator."""
        header = self._change(dict(message.header))
        return super().call(message._replace(header=header), timeout)


class HeavyLine(Line):
    """A line of a site that claims a weight of 1e9 times the true one."""

    weight: int

    def call(self, message: Message, timeout: float) -> Message:
        """Call the coordinator."""
        if message.header["kind"] == "reply" and message.arrays:
            heavy = {n for n, x in message.arrays.items() if x.shape == () and x == self.weight}
            assert heavy
            arrays = {n: 1e9 * x if n in heavy else x for n, x in message.arrays.items()}
            message = message._replace(arrays=arrays)
        return super().call(message, timeout)


class Federation:
    """The outcome of `run`."""

    def __init__(self, coordinator: Coordinator, lines: Mapping[str, Line], folder: Path) -> None:
        self.coordinator, self.lines, self.folder = coordinator, lines, folder
        self.run = coordinator.exchange.run
        self.refused: dict[str, str] = {}  # what the coordinator told sites that it refused

    @property
    def params(self) -> list[np.ndarray]:
        """The parameters of the model."""
        return [np.asarray(x) for x in jax.tree.leaves(self.coordinator.params)]


def run(
    experiment: Any,
    sites: Mapping[str, Any],
    folder: Path,
    *,
    rules: RoundRules | None = None,
    first_round_needs: int | None = None,
    lines: Mapping[str, Callable[[TaskExchange], Any]] | None = None,
    done: int = 0,
    may_be_refused: Sequence[str] = (),
    personal: bool = False,
    no_metrics: Sequence[str] = (),
    signers: Mapping[str, Any] | None = None,
    on_fault: Callable[[str, str], None] = lambda name, reason: None,
) -> Federation:
    """Run a federation to its end.

    Args:
        experiment: the coordinator's experiment.
        sites: the experiments of the sites by name.
        folder: an empty folder, with the folders of sites below it.
        rules: when rounds end. Default None: each needs all sites.
        first_round_needs: number of sites that the first round waits for. Default None: as in
            `rules`.
        lines: makes the lines of some sites. Default None: whole ones.
        done: rounds that the coordinator's folder has.
        personal: whether sites evaluate models of their clients' own.
        no_metrics: the sites that send no metrics.
        signers: what signs the keys of each site, and "coordinator"'s, which checks them. Default
            None: keys are not signed.
        on_fault: called with the name of a site and its fault.
        may_be_refused: sites without which the run goes on if they are refused.
    """
    rules = RoundRules(len(sites), 60.0) if rules is None else rules
    table, own_folder = (
        SiteTable(rules.silent_after, most_missed=rules.missed_rounds),
        folder / "coordinator",
    )
    own_folder.mkdir(parents=True, exist_ok=True)
    exchange = TaskExchange(
        identify(experiment, {}, experiment.shared_content()),
        table,
        rounds=experiment.training.rounds,
        run=new_token(),
        heartbeat_seconds=0.3,
        down=rules.down,
        folder=own_folder / "replies",
        on_fault=on_fault,
        clients_per_site=rules.clients_per_site,
    )
    if (saved := read_federation(own_folder)) is not None:
        exchange.run, exchange.inputs = saved["run"], saved["inputs"]
        exchange.agreed, exchange.opened = saved.get("agreed"), saved["opened"]
        table.restore(saved["sites"])
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(
            opened(
                experiment,
                own_folder,
                exchange,
                rules,
                done,
                signer=None if signers is None else signers["coordinator"],
            )
        )
        made = {name: (lines or {}).get(name, Line)(exchange) for name in sites}
        failures: list[BaseException] = []
        refused: dict[str, str] = {}

        def join(name: str, line: Any) -> None:
            mine: list[BaseException] = []
            messages = mine if name in may_be_refused else failures
            signer, sends_metrics = (signers or {}).get(name), name not in no_metrics
            take_part(name, sites[name], folder, line, messages, personal, signer, sends_metrics)
            refused.update((name, str(error)) for error in mine)

        threads = [threading.Thread(target=join, args=(name, line)) for name, line in made.items()]
        for thread in threads:
            thread.start()
        coordinator.stop = lambda: bool(failures)
        if first_round_needs is not None:
            coordinator.first_round_needs = first_round_needs
        try:
            coordinator.run()
        except BaseException as error:
            failures.append(error)  # the sites end too
        coordinator.say_goodbye(0.0 if failures else 20.0)
        for thread in threads:
            thread.join(60)
        if failures:
            raise failures[0]
    federation = Federation(coordinator, made, folder)
    federation.refused = refused
    return federation


@contextlib.contextmanager
def opened(
    experiment: Any,
    folder: Path,
    exchange: TaskExchange,
    rules: RoundRules,
    done: int = 0,
    signer: Any = None,
) -> Iterator[Coordinator]:
    """Open a coordinator's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        MetricsWriter(folder, after=done) as metrics,
        Checkpoints(folder, keep=2) as checkpoints,
        Progress("fed", rounds_done=done, rounds=1, enabled=False) as progress,
    ):
        yield Coordinator(
            experiment,
            folder,
            exchange,
            rules,
            checkpoints=checkpoints,
            metrics=metrics,
            progress=progress,
            stop=lambda: False,
            done=done,
            signer=signer,
        )


def take_part(
    name: str,
    experiment: Any,
    folder: Path,
    line: Any,
    failures: list[BaseException],
    personal: bool = False,
    signer: Any = None,
    sends_metrics: bool = True,
) -> None:
    """Run a site in this thread."""
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    progress = Progress(name, rounds_done=0, rounds=1, enabled=False)
    try:
        site = OneOfSeveral(
            experiment,
            own,
            line,
            progress,
            name=name,
            exp="",
            stop=lambda: bool(failures),
            give_up_after=5.0,
            personal=personal,
            sums=SecretTerms(name, signer=signer, folder=own),
            sends_metrics=sends_metrics,
        )
        with contextlib.closing(site):
            site.run()
    except BaseException as error:
        failures.append(error)


def write_hospitals(folder: Path, sizes: Mapping[str, Sequence[int]], seed: int = 0) -> None:
    """Write a folder of CSV files for each site, with a file of each size."""
    random, number = np.random.default_rng(seed), 0
    for site, counts in sizes.items():
        (folder / site).mkdir(parents=True)
        for count in counts:
            number += 1
            with (folder / site / f"h{number}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["age", "sex", "dose", "outcome"])
                for _ in range(count):
                    age, sex = random.normal(50 + number, 12), random.choice(["m", "f"])
                    dose = "" if random.random() < 0.1 else f"{random.random():.3f}"
                    score = (age - 50) / 12 + (0.8 if sex == "m" else -0.5) + random.normal(0, 0.6)
                    writer.writerow([f"{age:.2f}", sex, dose, "ill" if score > 0 else "well"])

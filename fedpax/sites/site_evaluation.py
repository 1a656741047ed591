"""Evaluation by site: each site measures the model on its own held-out examples."""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.algorithm import Params
from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.run_files.metrics import OF_SITE, with_quantiles
from fedpax.sites.downlink import whole
from fedpax.sites.site_experiment import FINE_TUNED, ClientRange, Finish
from fedpax.sites.site_files import RoundMetrics, SiteWatch
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import EVALUATION, SHARED, Task, new_token, numbered

_SECONDS_BETWEEN_ATTEMPTS = 1.0


class Heldout(NamedTuple):
    """The means of a site, and the numbers of examples in all and in parts."""

    examples: int
    parts: Mapping[str, int]
    means: Mapping[str, float]

    def count(self, name: str) -> int:
        """Return the number of examples of a mean."""
        name = name.removeprefix(f"{FINE_TUNED}_")
        return next((n for part, n in self.parts.items() if name.startswith(part)), self.examples)


class SiteEvaluation:
    """Sends the model to sites, and writes the metrics that they return."""

    def __init__(
        self,
        exchange: TaskExchange,
        log: RoundMetrics,
        watch: SiteWatch,
        round_seconds: float,
        stop: Callable[[], bool],
        finish: Finish,
        *,
        secure_sums: bool,
        note: Callable[[str], None],
    ) -> None:
        self._note, self._told = note, set[str]()  # what was noted
        self._secure_sums = secure_sums  # then sites send no means of labels
        self._exchange, self._log, self._watch, self._finish = exchange, log, watch, finish
        self._round_seconds, self._stop = round_seconds, stop
        self._with_model: set[str] = set()  # sites that have the model of the last round

    def evaluate(
        self, number: int, params: Params, *, last: bool, seconds: float | None = None
    ) -> None:
        """Ask the sites for the metrics of the model after a round."""
        present = [s for s in self._exchange.present() if s.name not in self._with_model]
        if not present:
            return
        arrays = numbered(SHARED, jax.tree.leaves(params))
        header = {"task": EVALUATION, "stage": 0, "last_stage": 0, "save": last}
        header["secure_sums"] = self._secure_sums
        task = Task(
            new_token(),
            header,
            whole(arrays),
            {s.name: ({"counted": s.counted}, {}) for s in present},
            {},
        )
        seconds = self._round_seconds if seconds is None else seconds
        replies = self._exchange.ask(task, 1, seconds, self._stop)
        measured: dict[str, Heldout] = {}
        for name, reply in (replies or {}).items():
            if why := reply.header.get("withheld"):
                self._note_once(f"site {name} sends no metrics {why}")
            means, count = reply.header.get("metrics"), reply.header.get("examples", 0)
            if isinstance(means, dict) and count > 0:
                known = {k: float(v) for k, v in means.items() if v is not None}
                measured[name] = Heldout(count, reply.header.get("parts", {}), known)
            if last and "fault" not in reply.header:
                self._with_model.add(name)
        # A site whose loss is not finite has none.
        with_loss = [each for each in measured.values() if "loss" in each.means]
        if not with_loss:
            return
        by_site: dict[str, float] = {}
        for name, heldout in measured.items():
            site = self._exchange.sites.get(name)
            assert site is not None
            site.heldout = self._metrics(heldout.means)
            by_site |= {f"{OF_SITE}{name}/{key}": value for key, value in site.heldout.items()}
        mean = self._metrics(_weighted_mean(with_loss))
        self._log.add_evaluation(number, mean, by_site, self._describe_absence(with_loss))

    def _note_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)

    def _describe_absence(self, measured: Sequence[Heldout]) -> str:
        """Say whose examples the metrics are of, unless they are of all sites."""
        number = len(self._exchange.sites.members)
        if len(measured) >= number:
            return ""
        examples = sum(heldout.examples for heldout in measured)
        return f" ({len(measured)} of {count_of(number, 'site')}, {count_of(examples, 'example')})"

    def _metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that are finite."""
        return {n: float(x) for n, x in self._finish(means).items() if math.isfinite(x)}

    def say_goodbye(self, number: int, params: Callable[[], Params], seconds: float) -> list[str]:
        """Answer sites until each of them knows the end of the run, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        end = deadline + self._round_seconds
        with_model, exchange, sites = self._with_model, self._exchange, self._exchange.sites
        exchange.publish(finished=True, awaits_model=lambda name: name not in with_model)
        members = sites.members

        def lacks_model() -> bool:
            return any(site.name not in with_model for site in exchange.present())

        def has_ended() -> bool:
            now = time.monotonic()
            unaware = [site for site in members if not (site.heard_end or site.left)]
            if now >= deadline:
                unaware = [site for site in unaware if sites.is_present(site, now)]
            return now >= end or not (unaware or lacks_model())

        while not self._stop() and not has_ended():
            if lacks_model():  # a site that was absent before
                now, before = time.monotonic(), len(with_model)
                left = max(0.1, (deadline if now < deadline else end) - now)
                self.evaluate(number, params(), last=True, seconds=left)
                if len(with_model) == before:
                    time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            exchange.wait_for(lambda: lacks_model() or has_ended(), self._stop)
        self._watch.update(force=True)
        return [site.name for site in members if site.name not in with_model]


def evaluation_of(experiment: Any) -> Callable[[Params], dict[str, float]]:
    """Return the metrics of a model on the held-out examples of the coordinator's own data."""
    experiment = copy.copy(experiment)  # as one of the sites; the coordinator's own stays
    number = int(experiment.describe_site()["clients"])
    run = experiment.at_site(ClientRange(0, number, number))
    if run.evaluate is None:
        raise ArgumentError(
            "accept_if needs held-out examples, and the coordinator's data have none. Give `fedpax "
            "syncer` data of its own with held-out examples, or leave --accept_if out."
        )

    def evaluate(params: Params) -> dict[str, float]:
        metrics = run.finish(with_quantiles(run.evaluate(params)))
        return {name: float(value) for name, value in metrics.items()}

    return evaluate


def _weighted_mean(by_site: Sequence[Heldout]) -> dict[str, float]:
    """Return the means that most sites have, weighted by numbers of examples."""
    # A minority can neither hide a metric nor add one.
    owners = Counter(name for each in by_site for name in each.means)
    means: dict[str, float] = {}
    for name in sorted(name for name, number in owners.items() if 2 * number > len(by_site)):
        known = [(each.count(name), each.means[name]) for each in by_site if name in each.means]
        total = sum(count for count, _ in known)
        if not total:
            continue
        # Divide first: count * value can be infinite.
        means[name] = sum(count / total * value for count, value in known)
    return means

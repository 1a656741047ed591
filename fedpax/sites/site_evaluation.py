"""Evaluation by site: each site measures the model on its own held-out examples."""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.run_files.metrics import OF_SITE, with_quantiles
from fedpax.sites.downlink import whole
from fedpax.sites.heldout_replies import (
    LEAST_LABELS,
    MOST_MEAN,
    Heldout,
    hash_model,
)
from fedpax.sites.site_experiment import ClientRange, Finish
from fedpax.sites.site_files import RoundMetrics, SiteWatch
from fedpax.sites.stage_calls import StageCalls, without_faults
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import EVALUATION, SHARED, TERM, Task, new_token, numbered
from fedpax.transforms.client_stages import Value

LEAST_SITES = 3
"""The fewest sites of which a secure sum is opened."""

_SECONDS_BETWEEN_ATTEMPTS = 1.0


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
        calls: StageCalls,
        secure_sums: bool,
        note: Callable[[str], None],
    ) -> None:
        self._note, self._told = note, set[str]()  # what was noted
        self._calls, self._secure_sums = calls, secure_sums
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
        header["secure_sums"] = self._secure_sums  # then metrics are not sent
        task = Task(
            new_token(),
            header,
            whole(arrays),
            {s.name: ({"counted": s.counted}, {}) for s in present},
            {},
        )
        seconds = self._round_seconds if seconds is None else seconds
        replies = self._exchange.ask(task, 1, seconds, self._stop)
        is_hidden, measured = self._secure_sums, dict[str, Heldout]()
        for name, reply in (replies or {}).items():
            if why := reply.header.get("withheld"):
                self._note_once(f"site {name} sends no metrics {why}")
            means, count = reply.header.get("metrics"), reply.header.get("examples", 0)
            if isinstance(means, dict) and count > 0:
                known = {k: float(v or 0) for k, v in means.items() if v is not None or is_hidden}
                measured[name] = Heldout(count, reply.header.get("parts", {}), known)
        # A site whose loss is not finite has none.
        with_loss = {name: each for name, each in measured.items() if "loss" in each.means}
        if with_loss and self._secure_sums:
            self._add_sum(number, hash_model([*arrays.values()]), with_loss, seconds)
        elif with_loss:
            self._add(number, measured, [*with_loss.values()])
        if last:  # after the sum: a site that has the model ends
            self._with_model.update(without_faults(replies or {}))
            self._exchange.publish()  # sites that already wait for the end

    def _add(
        self, number: int, measured: Mapping[str, Heldout], with_loss: Sequence[Heldout]
    ) -> None:
        """Write the metrics of sites and their mean."""
        by_site: dict[str, float] = {}
        for name, heldout in measured.items():
            site = self._exchange.sites.get(name)
            assert site is not None
            site.heldout = self._metrics(heldout.means)
            by_site |= {f"{OF_SITE}{name}/{key}": value for key, value in site.heldout.items()}
        mean = self._metrics(_weighted_mean(with_loss))
        self._log.add_evaluation(number, mean, by_site, self._describe_absence(with_loss))

    def _add_sum(
        self, number: int, model: str, measured: Mapping[str, Heldout], seconds: float
    ) -> None:
        """Ask sites that have measured a model for a secure sum, and write the means of all."""
        if len(measured) < LEAST_SITES:
            have = f"{LEAST_SITES} sites with metrics, not only {', '.join(measured)}"
            self._note_once(f"no held-out metrics: a secure sum of them needs {have}")
            return
        names = _common_names([*measured.values()])
        for name in _shared_names([*measured.values()]):
            if lacking := [site for site, each in measured.items() if name not in each.means]:
                self._note_once(f"no held-out {name}: {', '.join(lacking)} have none")
        header = {"task": EVALUATION, "stage": 0, "last_stage": 0, "save": False}
        header |= {"names": names, "model": model}
        own: Any = dict.fromkeys(measured, ({}, {}))
        task = Task(new_token(), header, whole({}), own, {})
        terms = [Value("held-out metrics", (2, len(names)), np.dtype(np.float64))]
        replies = self._calls.ask_for_sum(task, terms, dict.fromkeys(measured, 0), 1, seconds)
        if not (present := without_faults(replies or {})):
            return
        counts, sums = next(iter(present.values())).arrays[f"{TERM} 0"]
        parts = [*zip(names, counts, sums, strict=True)]
        most = LEAST_LABELS * MOST_MEAN  # the least that a mean which is not finite adds
        means = {n: total / k for n, k, total in parts if k > 0 and abs(total) < most}
        if lost := ", ".join(name for name, _, _ in parts if name not in means):
            self._note_once(f"no held-out {lost}: not finite at a site, which a secure sum hides")
        if "loss" in means:
            absence = self._describe_absence([measured[name] for name in present])
            self._log.add_evaluation(number, self._metrics(means), {}, absence)

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
    """Return the metrics of a model on the coordinator's own held-out examples."""
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


def _shared_names(by_site: Sequence[Heldout]) -> list[str]:
    """Return the names of the means that most sites have."""
    owners = Counter(name for each in by_site for name in each.means)
    return sorted(name for name, number in owners.items() if 2 * number > len(by_site))


def _common_names(by_site: Sequence[Heldout]) -> list[str]:
    """Return the names of the means that all sites have: a sum of others is of some sites alone."""
    return sorted(set.intersection(*({*each.means} for each in by_site)))


def _weighted_mean(by_site: Sequence[Heldout]) -> dict[str, float]:
    """Return the means that most sites have, weighted by numbers of examples."""
    means: dict[str, float] = {}
    for name in _shared_names(by_site):
        known = [(each.count(name), each.means[name]) for each in by_site if name in each.means]
        total = sum(count for count, _ in known)
        if not total:
            continue
        # Divide first: count * value can be infinite.
        means[name] = sum(count / total * value for count, value in known)
    return means

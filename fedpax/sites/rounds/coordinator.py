"""The rounds of a coordinator: what it asks the sites, and what it does with their replies."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.errors import FedpaxError
from fedpax.reports.metric_table import OF_SITE
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import MetricsWriter
from fedpax.sites.rounds.contract import Json
from fedpax.sites.rounds.coordinator_files import RoundMetrics, SiteWatch, write_federation
from fedpax.sites.rounds.coordinator_program import (
    CoordinatorProgram,
    check_masks,
    check_program,
    cohort_types,
    expected_arrays,
    no_reply,
)
from fedpax.sites.rounds.coordinator_state import (
    CoordinatorState,
    divide,
    initial_state,
    pack,
    server_leaves,
)
from fedpax.sites.rounds.downlink import Downlink, whole
from fedpax.sites.rounds.exchange import (
    ROW,
    SHARED,
    SHOWN,
    TERM,
    Exchange,
    Reply,
    Task,
    in_order,
    new_token,
    numbered,
)
from fedpax.sites.rounds.merge_guard import MergeGuard, evaluation_of
from fedpax.sites.rounds.round_rules import RoundRules
from fedpax.sites.rounds.secret_terms import ask_for_sums, check_is_sum
from fedpax.sites.rounds.site_table import Site
from fedpax.sites.rounds.update_rows import UpdateRows
from fedpax.training.due_rounds import is_due
from fedpax.training.logging import NonFiniteError
from fedpax.training.progress import Progress
from fedpax.transforms.stages import Request, Stages

MOST_FAILURES = 5
"""Times that a round may fail by replies that do not count."""

SECONDS_BETWEEN_ATTEMPTS = 1.0


class FailedRoundError(FedpaxError, RuntimeError):
    """A round that too few sites answer with replies that count."""

    exit_status = 1


class Coordinator:
    """The rounds of a run over its sites, from the last one that is saved."""

    def __init__(
        self,
        experiment: Any,
        folder: Path,
        exchange: Exchange,
        rules: RoundRules,
        *,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        progress: Progress,
        stop: Callable[[], bool],
        done: int,
    ) -> None:
        self._experiment, self._folder, self.exchange = experiment, folder, exchange
        self._rules, self._checkpoints, self._metrics = rules, checkpoints, metrics
        self._progress, self.stop, self.done = progress, stop, done
        self._guard = MergeGuard(rules)
        self._sites_with_model: set[str] = set()  # of the last round
        self._programs: dict[int, CoordinatorProgram] = {}
        self._state: CoordinatorState | None = None
        self._configuration = to_json(experiment)
        self._downlink = Downlink(rules.down, new_token())
        self.first_round_needs = rules.min_sites
        self._watch = SiteWatch(folder, progress, exchange.sites)
        self._log = RoundMetrics(metrics, progress)

    @property
    def params(self) -> Params:
        """The model after the last round of this process."""
        assert self._state is not None
        return self._state.params

    # ---- the run

    def run(self) -> None:
        """Run the rounds that are left, or until a signal asks to stop."""
        exchange, rounds = self.exchange, self._experiment.training.rounds
        exchange.round = self.done
        if self.done >= rounds:  # sites that lack the model can still get it
            self._experiment = self._experiment.with_inputs(exchange.inputs)
            return
        if exchange.inputs is None and not self._agree():
            return
        self._experiment = self._experiment.with_inputs(exchange.inputs)
        self._experiment.write_inputs(self._folder)
        if self._rules.accept_if:
            self._guard = MergeGuard(self._rules, evaluation_of(self._experiment))
        if not self._wait_for_sites(ready=True):
            return
        failures = 0
        while self.done < rounds and not self.stop():
            if len(self.exchange.present()) < self._rules.min_sites:
                self._wait_for_sites(ready=True)
                continue
            if not self._round(self.done + 1):
                failures += 1
                self._pause(failures)
                continue
            failures = 0
            if is_due(self.done, rounds, self._experiment.training.evaluate_every):
                self._evaluate(last=self.done == rounds)
            self._watch.update()

    def _agree(self) -> bool:
        """Make the inputs that all sites share, from what they tell; False at a signal."""
        while self._wait_for_sites(ready=False):
            present = self.exchange.begin_agreement()
            agreement = self._experiment.agree([site.description for site in present])
            self._progress.note(f"{len(present)} sites agree on their inputs")
            answer: Any = None
            try:
                while True:
                    question = agreement.send(answer)
                    answer = self._ask_question(question, present)
                    if answer is None:
                        break
            except StopIteration as end:
                write_federation(self._folder, self.exchange.run, end.value, self.exchange.sites)
                self.exchange.publish(inputs=end.value)
                return True
            self._progress.note("a site left while the inputs were agreed on; begins again")
        return False

    def _ask_question(self, question: Any, present: Sequence[Site]) -> Any:
        everyone = {s.name: list(range(s.first, s.first + s.count)) for s in present}
        server, reply, token = question.stages.run(*question.args), None, new_token()
        while True:
            try:
                request = server.send(reply)
            except StopIteration as end:
                return end.value
            header = {"task": "question", "settings": question.settings}
            header["num_clients"] = question.stages.placement.size
            replies = self._ask_stage(
                question.stages,
                request,
                token,
                header,
                everyone,
                everyone,
                len(present),
                {name: clients[0] for name, clients in everyone.items()},
            )
            if replies is None or len(_whole(replies)) < len(present):
                return None
            reply = self._merge(question.stages, request, replies, everyone)

    def _wait_for_sites(self, *, ready: bool) -> bool:
        number = self._rules.min_sites if self.done else self.first_round_needs
        self.exchange.waits_for = f"{number} sites"
        self._progress.note(f"waiting for {number} sites")

        def enough() -> bool:
            self._watch.update()
            return len(self.exchange.present(ready=ready)) >= number

        return self.exchange.wait_for(enough, self.stop)

    def _pause(self, failures: int) -> None:
        """Wait after a round that too few sites answered; raise if the next one is in vain."""
        number, faults = self.done + 1, self.exchange.faults
        if failures >= MOST_FAILURES and faults:
            described = "; ".join(f"{name}: {fault}" for name, fault in sorted(faults.items())[:5])
            raise FailedRoundError(
                f"round {number} began {failures} times, and each time fewer sites than it needs "
                f"sent a reply that counts ({described}). Mend these sites, or run with a smaller "
                "--min_sites; then run the same command again to resume."
            )
        if not self.stop():
            self._progress.note(f"round {number}: too few sites answer; begins again")
        until = time.monotonic() + SECONDS_BETWEEN_ATTEMPTS
        self.exchange.wait_for(lambda: time.monotonic() >= until, self.stop)

    # ---- one round

    def _program(self, number: int) -> CoordinatorProgram:
        """Return the program for a number of clients."""
        if number not in self._programs:
            run = self._experiment.coordinate(number)
            state = jax.eval_shape(lambda: run.algorithm.init(run.init(jax.random.key(0))))
            cohort = cohort_types(self.exchange.types, run.cohort_size)
            divided = divide(run.algorithm, state, cohort, run.frozen)
            check_program(divided, self._guard.is_active)
            self._programs = {number: CoordinatorProgram(run, divided, state, cohort)}
        return self._programs[number]

    def _start(self, program: CoordinatorProgram) -> CoordinatorState:
        """Restore the state, or make a new one."""
        initial = program.run.initial
        if initial is None or self.done:
            params = jax.jit(program.run.init)(jax.random.key(self._experiment.training.seed))
        else:
            params = initial.load()
        state, _ = initial_state(program.run.algorithm, params, program.stages)
        for site in self.exchange.sites:
            site.counted = None  # `federation.json` can be a round ahead of the state
        if not self.done:
            size = sum(leaf.size for leaf in jax.tree.leaves(params))
            clients = self.exchange.sites.num_clients
            self._metrics.write_sizes(
                {"num_parameters": size, "num_participants": program.run.cohort_size}
                | {"item_unit": "examples", "items_per_round": 0}
            )
            self._progress.note(f"{size:,} parameters, {clients} clients; folder {self._folder}")
            return state
        restored: CoordinatorState = self._checkpoints.restore_state(state)
        position: Any = self._checkpoints.restore_position().stream
        self._guard.restore(position.get("norms", []))
        counted = position["counted"]
        for site in self.exchange.sites:
            site.counted = counted.get(site.name)
        self._progress.note(f"resuming after round {self.done}")
        return restored

    def _round(self, number: int) -> bool:
        """Run a round; False if too few sites answer, or at a signal."""
        exchange, began = self.exchange, time.perf_counter()
        exchange.round = number
        ranges, total = exchange.snapshot()
        program = self._program(total)
        if self._state is None:
            self._state = self._start(program)
        present = np.zeros(total, np.bool_)
        for clients_of_site in ranges.values():
            present[clients_of_site.start : clients_of_site.stop] = True
        sampled = [int(client) for client in program.run.sample(number - 1, present)]
        slots = {client: slot for slot, client in enumerate(sampled)}
        clients = {name: [k for k in own if k in slots] for name, own in ranges.items()}
        clients = {name: chosen for name, chosen in clients.items() if chosen}
        token = new_token()
        header: dict[str, Any] = {"task": "round", "weights": self._rules.weights}
        header |= {"num_clients": total, "cohort_size": len(sampled)}
        firsts = {name: own.start for name, own in ranges.items()}
        server = program.serve(self._state)
        reply: Any = None
        before = exchange.sent_bytes, exchange.received_bytes
        answered: dict[str, Reply] = {}
        earlier: list[Any] = []
        dropped: dict[str, str] = {}
        while True:
            try:
                request = server.send(reply)
            except StopIteration as end:
                state, metrics = end.value
                break
            if not sampled:  # Poisson sampling can draw none
                reply = no_reply(program.stages[request.stage])
                continue
            quorum = min(self._rules.min_sites, len(clients)) or 1
            replies = self._ask_stage(
                program.stages,
                request,
                token,
                header,
                clients,
                _slots(clients, slots),
                quorum,
                firsts,
            )
            if replies is None:
                return False
            answered = _whole(replies)
            if self._guard.is_active and request.stage == len(program.stages) - 1:
                dropped = self._drop(program, earlier, request, answered, _slots(clients, slots))
                replies |= {name: Reply({"fault": why}, {}) for name, why in dropped.items()}
                answered = _whole(replies)
            self._note_faults(number, replies)
            if request.stage and answered.keys() != clients.keys():
                # Earlier stages have counted it.
                self._progress.note(f"round {number}: a site left between stages; begins again")
                return False
            clients = {name: chosen for name, chosen in clients.items() if name in answered}
            reply = self._merge(program.stages, request, replies, _slots(clients, slots))
            earlier.append(reply)
        self._state = pack(program.state, server_leaves(program.stages, state))
        self._check_finite(number)
        for site in exchange.sites:
            if site.name in answered:
                site.counted, site.rounds = token, site.rounds + 1
        self._log.add(
            number,
            {**metrics, "dropped_sites": len(dropped)} if self._guard.is_active else metrics,
            sites=len(answered),
            examples=sum(int(reply.header.get("examples", 0)) for reply in answered.values()),
            sent_bytes=exchange.sent_bytes - before[0],
            received_bytes=exchange.received_bytes - before[1],
            seconds=time.perf_counter() - began,
        )
        self._save(number)
        return True

    def _drop(
        self,
        program: CoordinatorProgram,
        earlier: Sequence[Any],
        request: Request,
        replies: Mapping[str, Reply],
        slots: Mapping[str, Sequence[int]],
    ) -> dict[str, str]:
        """Return the sites whose replies to the last stage are not merged, with reasons."""

        def model_of(names: frozenset[str]) -> Params:
            assert self._state is not None
            some = {name: reply for name, reply in replies.items() if name in names}
            reply = self._merge(program.stages, request, some, slots)
            server = program.serve(self._state)
            try:
                for message in (None, *earlier, reply):
                    server.send(message)
            except StopIteration as end:
                state, _ = end.value
            params: Params = state.params
            return params

        dropped = self._guard.drop(list(replies), model_of)
        for name in dropped:
            site = self.exchange.sites.get(name)
            assert site is not None
            site.dropped += 1
        return dropped

    def _ask_stage(
        self,
        divided: Stages,
        request: Request,
        token: str,
        header: Json,
        clients: Mapping[str, Sequence[int]],
        slots: Mapping[str, Sequence[int]],
        quorum: int,
        firsts: Mapping[str, int],
    ) -> dict[str, Reply] | None:
        rows = [np.asarray(x) for x in request.rows]
        shared = numbered(SHARED, request.shared)
        is_model = header["task"] == "round" and request.stage == 0
        packet = self._downlink.pack(shared) if is_model else whole(shared)
        sites = self.exchange.sites
        own = {}
        for name, chosen in clients.items():
            site = sites.get(name)
            assert site is not None
            fields: dict[str, Any] = {"clients": list(chosen), "slots": list(slots[name])}
            fields |= {"counted": site.counted, "first_client": firsts[name]}
            own[name] = fields, numbered(ROW, [x[np.array(slots[name])] for x in rows])
        task = Task(
            token,
            {**header, "stage": request.stage, "last_stage": len(divided) - 1},
            packet,
            own,
            expected_arrays(divided[request.stage]),
        )
        rules = self._rules
        check_masks(divided, rules.secure_sums)
        if not rules.secure_sums:
            return self.exchange.ask(task, quorum, rules.round_seconds, self.stop)
        stage = divided[request.stage]
        check_is_sum(stage, divided.adds(request.stage))
        try:
            return ask_for_sums(
                self.exchange,
                task,
                stage,
                quorum,
                rules.round_seconds,
                self.stop,
                threshold=rules.secure_threshold,
                clients={name: len(chosen) for name, chosen in clients.items()},
                least_clients=divided.least_masked or 0,
            )
        except FedpaxError as error:
            self._progress.note(f"no secure sum: {error}")
            return None

    def _merge(
        self,
        divided: Stages,
        request: Request,
        replies: Mapping[str, Reply],
        slots: Mapping[str, Sequence[int]],
    ) -> tuple[Any, Any, list[int]]:
        """Merge the terms of sites, in the order of their names."""
        merge = divided.merge(request.stage)
        merged: Any = ()
        values = divided[request.stage].shown
        with UpdateRows(values, divided.placement.size, self._folder) as shown:
            for name, reply in _whole(replies).items():
                arrays = reply.arrays
                if terms := in_order(TERM, arrays):  # the first reply has all of a secure sum
                    merged = merge(merged, terms) if merged else terms
                shown.add(slots[name], in_order(SHOWN, arrays))
            return (tuple(jnp.asarray(x) for x in merged), *shown.finish())

    def _note_faults(self, number: int, replies: Mapping[str, Reply]) -> None:
        for name, reply in replies.items():
            if fault := reply.header.get("fault"):
                self._progress.note(f"round {number}: the reply of {name} is not counted: {fault}")

    def _check_finite(self, number: int) -> None:
        assert self._state is not None
        if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(self._state.params)):
            raise NonFiniteError(
                f"round {number} made a parameter NaN or infinite, expected finite values. The "
                "state before it is saved. Use a smaller learning rate, or a robust aggregator."
            )

    # ---- files

    def _save(self, number: int) -> None:
        """Save the state of a round, before a site hears of it."""
        counted = {site.name: site.counted for site in self.exchange.sites}
        self._metrics.sync()
        position = {"counted": counted, "norms": self._guard.to_json()}
        exchange = self.exchange
        write_federation(self._folder, exchange.run, exchange.inputs, exchange.sites)
        self._checkpoints.save(number, self._state, position, self._configuration)
        self._checkpoints.wait()
        self.done = number

    def _evaluate(self, *, last: bool, seconds: float | None = None) -> None:
        """Ask the sites for the metrics of the model on their held-out examples."""
        present = [s for s in self.exchange.present() if s.name not in self._sites_with_model]
        if not present:
            return
        if self._state is None:
            self._state = self._start(self._program(self.exchange.sites.num_clients))
        arrays = numbered(SHARED, jax.tree.leaves(self._state.params))
        header = {"task": "evaluate", "stage": 0, "last_stage": 0, "save": last}
        own: dict[str, Any] = {site.name: ({}, {}) for site in present}
        task = Task(new_token(), header, whole(arrays), own, {})
        seconds = self._rules.round_seconds if seconds is None else seconds
        replies = self.exchange.ask(task, 1, seconds, self.stop)
        found: dict[str, tuple[int, dict[str, float]]] = {}
        for name, reply in (replies or {}).items():
            metrics, count = reply.header.get("metrics"), reply.header.get("examples", 0)
            if isinstance(metrics, dict) and count > 0:
                found[name] = count, {k: float(v) for k, v in metrics.items() if v is not None}
            if last and "fault" not in reply.header:
                self._sites_with_model.add(name)
        # A site whose loss is not finite has none.
        with_loss = [each for each in found.values() if "loss" in each[1]]
        if not with_loss:
            return
        mean = _weighted_mean(with_loss)
        by_site: dict[str, float] = {}
        for name, (_, metrics) in found.items():
            site = self.exchange.sites.get(name)
            assert site is not None
            site.heldout = metrics
            by_site |= {f"{OF_SITE}{name}/{key}": value for key, value in metrics.items()}
        self._log.add_evaluation(self.done, mean, by_site)

    def say_goodbye(self, seconds: float) -> None:
        """Answer sites until each of them knows the end of the run, at most for `seconds`."""
        deadline = time.monotonic() + seconds

        with_model = self._sites_with_model
        self.exchange.publish(finished=True, awaits_model=lambda name: name not in with_model)

        def all_heard() -> bool:
            return all(site.heard_end or site.left for site in self.exchange.sites)

        while not self.stop() and time.monotonic() < deadline:
            # Of sites that were absent before.
            self._evaluate(last=True, seconds=max(0.1, deadline - time.monotonic()))
            if (
                self.exchange.wait_for(
                    lambda: all_heard() or self._lacks_model() or time.monotonic() >= deadline,
                    self.stop,
                )
                and not self._lacks_model()
            ):
                break
        self._watch.update(force=True)

    def _lacks_model(self) -> bool:
        return any(site.name not in self._sites_with_model for site in self.exchange.present())


def _slots(clients: Mapping[str, Sequence[int]], slots: Mapping[int, int]) -> dict[str, list[int]]:
    return {name: [slots[client] for client in chosen] for name, chosen in clients.items()}


def _whole(replies: Mapping[str, Reply]) -> dict[str, Reply]:
    return {name: reply for name, reply in replies.items() if "fault" not in reply.header}


def _weighted_mean(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of metrics that all have, weighted by numbers of examples."""
    names = set.intersection(*(set(metrics) for _, metrics in found))
    total = sum(count for count, _ in found)
    return {
        name: sum(count * metrics[name] for count, metrics in found) / total
        for name in sorted(names)
    }

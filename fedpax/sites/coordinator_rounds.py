"""The rounds of a coordinator: what it asks the sites, and what it does with their replies."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.console import count_of
from fedpax.errors import FedpaxError
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import OF_SITE, MetricsWriter
from fedpax.secure_sums.roster import Signer
from fedpax.sites.agreement import Agreement
from fedpax.sites.coordinator_program import (
    CoordinatorProgram,
    CoordinatorState,
    batch_types,
    check_program,
    check_repeatable,
    cohort_types,
    divide,
    initial_state,
    no_reply,
    pack,
    server_leaves,
)
from fedpax.sites.merge_guard import MergeGuard, drop_replies
from fedpax.sites.participants import Participants, choose_participants, opened_round
from fedpax.sites.round_rules import RoundRules, describe_sampling
from fedpax.sites.site_evaluation import SiteEvaluation, evaluation_of
from fedpax.sites.site_experiment import Json
from fedpax.sites.site_files import RoundMetrics, SiteWatch, write_federation
from fedpax.sites.site_process import items_of
from fedpax.sites.stage_calls import StageCalls, without_faults
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import ROUND, SiteReply, new_token
from fedpax.sites.uplink import check_up
from fedpax.training.progress import Progress
from fedpax.training.round_logger import NonFiniteError
from fedpax.training.training_config import is_due

MOST_FAILURES = 5
"""Times that a round may fail by replies that do not count."""

MANY_SITES = 3
"""The fewest sites of which none can compute from a sum what another one sent."""

SECONDS_BETWEEN_ATTEMPTS = 1.0


class FailedRoundError(FedpaxError, RuntimeError):
    """A round that too few sites answer with replies that count."""

    exit_status = 1


class _Outcome(NamedTuple):
    """The stages of a round that enough sites answered."""

    result: tuple[Any, Any]
    token: str
    answered: Mapping[str, SiteReply]  # of the last stage that sites were asked for
    dropped: int  # number of sites whose replies a guard dropped


class Coordinator:
    """The rounds of a run over its sites, from the last one that is saved."""

    def __init__(
        self,
        experiment: Any,
        folder: Path,
        exchange: TaskExchange,
        rules: RoundRules,
        *,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        progress: Progress,
        stop: Callable[[], bool],
        done: int,
        signer: Signer | None = None,
    ) -> None:
        self._experiment, self._folder, self.exchange = experiment, folder, exchange
        self._rules, self._checkpoints, self._metrics = rules, checkpoints, metrics
        self._progress, self.stop, self.done = progress, stop, done
        self._guard = MergeGuard(rules.norm_factor, rules.accept_if)
        self._programs: dict[int, CoordinatorProgram] = {}
        self._state: CoordinatorState | None = None
        self._left: set[str] = set()  # sites that left between the stages of the next round
        self._configuration = to_json(experiment)
        self.first_round_needs = rules.min_sites
        self._watch = SiteWatch(folder, progress, exchange.sites)
        self._log = RoundMetrics(metrics, progress)

        def stop_now() -> bool:
            return self.stop()

        self._calls = StageCalls(exchange, rules, folder, progress.note, stop_now, signer)
        self._agreement = Agreement(
            experiment,
            folder,
            exchange,
            self._calls,
            self._watch,
            progress,
            stop_now,
            tie_seconds=rules.round_seconds,
        )
        self._evaluation = SiteEvaluation(
            exchange,
            self._log,
            self._watch,
            rules.round_seconds,
            stop_now,
            self._finish,
            calls=self._calls,
            secure_sums=rules.secure_sums,
            note=progress.note,
        )

    @property
    def params(self) -> Params:
        """The model after the last round of this process."""
        assert self._state is not None
        return self._state.params

    def run(self) -> None:
        """Run the rounds that are left, or until a signal asks to stop."""
        exchange, rounds = self.exchange, self._experiment.training.rounds
        exchange.round = self.done
        if self.done >= rounds:  # sites that lack the model can still get it
            self._experiment = self._experiment.with_inputs(exchange.inputs)
            return
        least = self._rules.min_sites
        needed = least if self.done else self.first_round_needs
        if exchange.inputs is None and not self._agreement.agree(needed, least):
            return
        self._experiment = self._experiment.with_inputs(exchange.inputs)
        self._experiment.write_inputs(self._folder)
        if self._rules.accept_if:
            rules, evaluate = self._rules, evaluation_of(self._experiment)
            self._guard = MergeGuard(rules.norm_factor, rules.accept_if, evaluate)
        if not self._agreement.settle_types(self._batch_types(), needed, least):
            return
        if not self._agreement.wait_for_sites(needed, least, ready=True):
            return
        if not self.done:
            exchange.wait_for(exchange.sites.leave_out_refused, self.stop)
        if least < MANY_SITES and len(exchange.present()) < MANY_SITES:
            self._progress.note(
                "fewer than 3 sites: from the model before and after a round, each of two sites "
                "can compute what the other one sent"
            )
        failures = 0
        while self.done < rounds and not self.stop():
            if not self._agreement.has_enough(least):
                self._agreement.wait_for_sites(least, least, ready=True)
                continue
            if not self._round(self.done + 1):
                failures += 1
                self._pause(failures)
                continue
            failures = 0
            if is_due(self.done, rounds, self._experiment.training.evaluate_every):
                self._evaluation.evaluate(self.done, self.params, last=self.done == rounds)
            self._watch.update()

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

    def say_goodbye(self, seconds: float) -> None:
        """Answer sites until each of them knows the end of the run, at most for `seconds`."""

        def params() -> Params:
            if self._state is None:
                self._agreement.settle_types(self._batch_types(), 1, 1)
                self._state = self._start(self._program(self.exchange.sites.num_clients))
            return self._state.params

        if missing := self._evaluation.say_goodbye(self.done, params, seconds):
            self._progress.note(
                f"sites that have not asked for the last model: {', '.join(missing)}. If they lack "
                "it, run the same command again, and start them"
            )

    def _batch_types(self) -> Json | None:
        """Return the types of a batch, if the experiment knows them without data."""
        batches = self._experiment.coordinate(self.exchange.sites.num_clients).batches
        return None if batches is None else batch_types(batches)

    def _program(self, number: int) -> CoordinatorProgram:
        """Return the program for a number of clients."""
        if number not in self._programs:
            run = self._experiment.coordinate(number)
            state = jax.eval_shape(lambda: run.algorithm.init(run.init(jax.random.key(0))))
            cohort = cohort_types(self.exchange.types, run.cohort_size)
            divided = divide(run.algorithm, state, cohort, run.frozen)
            check_program(divided, self._guard.is_active)
            if told := check_up(self._rules.up, divided, run.accountant is not None):
                self._progress.note(told)
            self._programs = {number: CoordinatorProgram(run, divided, state, cohort)}
        return self._programs[number]

    def _finish(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Make metrics of the means of sites."""
        (program,) = self._programs.values()
        return program.run.finish(means)

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
            sites = self.exchange.sites
            unit = items_of(self._experiment)[0]
            self._metrics.write_sizes(size, program.run.cohort_size, unit, 0)
            sizes = f"{count_of(size, 'parameter')}, {count_of(sites.num_clients, 'client')}"
            self._progress.note(f"{sizes}; folder {self._folder}")
            for line in (*program.run.notes, *describe_sampling(self._rules, sites, program.run)):
                self._progress.note(line)
            return state
        restored: CoordinatorState = self._checkpoints.restore_state(state)
        position: Any = self._checkpoints.restore_position().stream
        self._guard.restore(position.get("norms", []))
        for site in self.exchange.sites:
            site.counted = position["counted"].get(site.name)
        self._progress.note(f"resuming after round {self.done}")
        return restored

    def _round(self, number: int) -> bool:
        """Run a round; False if too few sites answer, or at a signal."""
        exchange, began = self.exchange, time.perf_counter()
        exchange.round = number
        again = opened_round(exchange, number) if self._rules.secure_sums else None
        if again is not None and not self._agreement.wait_for_same(again.clients, ready=True):
            return False
        ranges, total = exchange.snapshot()
        stayed = {name: places for name, places in ranges.items() if name not in self._left}
        if len(stayed) >= self._rules.min_sites:
            ranges = stayed
        else:  # the round needs such a site too
            self._left = set()
        if len(ranges) < self._rules.min_sites:
            return False
        program = self._program(total if again is None else again.total)
        if self._state is None:
            self._state = self._start(program)
        who = again or choose_participants(program, number, ranges, total)
        before = exchange.sent_bytes, exchange.received_bytes
        outcome = self._run_stages(program, number, who)
        if outcome is None:
            return False
        self._left = set()
        state, metrics = outcome.result
        self._state = pack(program.state, server_leaves(program.stages, state))
        self._check_finite(number)
        for site in exchange.sites:
            if site.name in outcome.answered:
                site.counted, site.rounds = outcome.token, site.rounds + 1
                site.attendance.take_part(ROUND)
            if program.run.accountant is not None and site.releases:
                site.epsilon = float(program.run.accountant.epsilon(site.releases))
        self._log.add(
            number,
            metrics
            | ({"dropped_sites": outcome.dropped} if self._guard.is_active else {})
            | {f"{OF_SITE}{s.name}/epsilon": s.epsilon for s in exchange.sites if s.epsilon}
            | {f"{OF_SITE}{name}/weight": x for name, x in exchange.sites.shares().items()},
            sites=len(outcome.answered),
            items=items_of(self._experiment)[1]
            * sum(int(r.header.get("examples", 0)) for r in outcome.answered.values()),
            sent_bytes=exchange.sent_bytes - before[0],
            received_bytes=exchange.received_bytes - before[1],
            seconds=time.perf_counter() - began,
        )
        self._save(number)
        return True

    def _run_stages(
        self, program: CoordinatorProgram, number: int, who: Participants
    ) -> _Outcome | None:
        """Run the stages of a round; None if too few sites answer, or at a signal."""
        divided, token = program.stages, new_token()
        header: dict[str, Any] = {"task": ROUND, "weights": self._rules.weights}
        header |= {"num_clients": who.total, "cohort_size": who.cohort_size}
        server, reply, earlier = program.serve(self._state), None, list[Any]()
        answered: dict[str, SiteReply] = {}
        dropped: dict[str, str] = {}
        while True:
            try:
                request = server.send(reply)
            except StopIteration as end:
                return _Outcome(end.value, token, answered, len(dropped))
            if not who.clients:  # Poisson sampling can draw none
                reply = no_reply(divided[request.stage])
                continue
            computed = self._calls.compute(divided, request, earlier, who.slots)
            if computed is None or divided[request.stage].kept:
                quorum = min(self._rules.min_sites, len(who.clients))
                replies = self._calls.ask(divided, request, token, header, who, quorum)
                if replies is None:
                    if not self.stop():
                        check_repeatable(divided, request.stage, number)
                    return None
                answered = without_faults(replies)
                if self._guard.is_active and request.stage == len(divided) - 1:
                    assert self._state is not None
                    dropped = drop_replies(
                        self._guard,
                        self._calls,
                        program,
                        self._state,
                        earlier,
                        request,
                        answered,
                        who,
                    )
                    for name in dropped:
                        site = self.exchange.sites.get(name)
                        assert site is not None
                        site.dropped += 1
                    replies |= {n: SiteReply({"fault": why}, {}) for n, why in dropped.items()}
                    answered = without_faults(replies)
                self._note_faults(number, replies)
                if request.stage and (left := who.clients.keys() - answered.keys()):
                    # Earlier stages have counted them.
                    check_repeatable(divided, request.stage, number)
                    names = ", ".join(sorted(left))
                    self._progress.note(
                        f"round {number}: {names} left between stages; begins again, without them "
                        "if --min_sites allows it"
                    )
                    self._left |= left
                    return None
                who = who.of(answered)
            reply = computed or self._calls.merge(divided, request, answered, who)
            earlier.append(reply)

    def _note_faults(self, number: int, replies: Mapping[str, SiteReply]) -> None:
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

    def _save(self, number: int) -> None:
        """Save the state of a round, before a site hears of it."""
        counted = {site.name: site.counted for site in self.exchange.sites}
        self._metrics.sync()
        position = {"counted": counted, "norms": self._guard.to_json()}
        write_federation(self._folder, self.exchange, self.exchange.inputs)
        self._checkpoints.save(number, self._state, position, self._configuration)
        self._checkpoints.wait()
        self.done = number

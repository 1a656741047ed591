"""The server of rounds on nodes: it asks nodes by messages, and counts their answers."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from fedpax.deploy.encoded_values import decode_list, decode_values, encode_list
from fedpax.deploy.nodes.node_roster import Network, NodeReply, NodeRoster
from fedpax.deploy.packets import Packet, one_line
from fedpax.deploy.round_program import RoundProgram
from fedpax.deploy.runtime import StageRequest
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.populations.client_sampler import ClientSampler
from fedpax.transforms.client_stages import has_opened_noise
from fedpax.transforms.stage_noise import draw_noise
from fedpax.transforms.stages import drive

POLL_SECONDS = 0.25
_SECONDS_BETWEEN_HINTS = 60.0
_ATTEMPTS = 3
_IF_SLOW = (
    "If their SuperNodes' logs show 401, their machines are too slow for the 30 s that Flower "
    "gives a process to start: run fewer nodes on a machine, or keep Python's packages on a local "
    "disk."
)


class RoundError(FedpaxError):
    """A round that too few participants answer; the message names the remedy."""


class SecureSum(Protocol):
    """Sums terms so that the server does not see them."""

    least: int
    most: int | None  # the most, or None without a limit
    problem: str  # why a node was left out last

    def values(self, participants: int) -> dict[str, Any]:
        """Return what a packet says for a secure sum."""
        ...

    def __call__(
        self,
        packets: Mapping[int, Packet],
        terms: Sequence[Mapping[str, Any]],
        quorum: int,
        seconds: float | None,
    ) -> tuple[list[int], list[Any]]:
        """Return the nodes whose terms were summed, and the sums; `[]` and `[]` if too few."""
        ...


class Rules(NamedTuple):
    """When a round ends: with `enough` answers, or with `quorum` at `deadline` seconds; 0: all."""

    quorum: int = 0
    enough: int = 0
    deadline: float = 0.0
    wait: float = 600.0


_WAIT_FOR_ALL = Rules()


class ServerPosition(NamedTuple):
    """Where a run is: what continues it on another server.

    `counted` is for each participant the last round that counted it.
    """

    round: int
    state: Mapping[str, Any]
    counted: Mapping[int, str]


class RoundServer:
    """Runs the rounds of a program on nodes."""

    def __init__(
        self,
        network: Network,
        program: RoundProgram,
        *,
        run: str,
        rules: Rules = _WAIT_FOR_ALL,
        seed: int = 0,
        log: logging.Logger | None = None,
        sleep: Callable[[float], None] = time.sleep,
        secure: SecureSum | None = None,
    ) -> None:
        self.network, self.program, self.run, self.rules, self.seed = (
            network,
            program,
            run,
            rules,
            seed,
        )
        self._log = log or logging.getLogger("fedpax")
        self._sleep, self._secure = sleep, secure
        self._last_problem = ""
        self.roster = NodeRoster(network, program, self._log)
        size = program.size
        for name, value in (("quorum", rules.quorum), ("enough", rules.enough)):
            if not 0 <= value <= size:
                raise ArgumentError(
                    f"{name}={value}, expected at most {size}, the participants of a round. 0: all."
                )
        if rules.enough and rules.quorum > rules.enough:
            raise ArgumentError(
                f"quorum={rules.quorum} is above enough={rules.enough}. Set quorum to at most "
                "enough."
            )

    @property
    def quorum(self) -> int:
        """The fewest participants that must answer."""
        return self.rules.quorum or self.rules.enough or self.program.size

    def begin(self) -> ServerPosition:
        """Return the position of a new run."""
        return ServerPosition(0, self.program.initial_server(self.seed), {})

    def advance(self, position: ServerPosition) -> tuple[ServerPosition, dict[str, Any]]:
        """Run one round."""
        number = position.round
        for attempt in range(_ATTEMPTS):
            key = f"{number}.{attempt}"
            asked = self._ask(number)
            counted, results = self._attempt(position, key, asked)
            if results is not None:
                state = {
                    name: results.get(result, position.state[name])
                    for name, result in self.program.names["carried"].items()
                }
                metrics = {
                    name.removeprefix("result[1]"): value
                    for name, value in results.items()
                    if name.startswith("result[1]")
                }
                new = {**position.counted, **dict.fromkeys(counted, key)}
                metrics["participants"] = len(counted)
                return ServerPosition(number + 1, state, new), metrics
            self._log.warning(
                "Round %d: %d of %d participants answered, expected at least %d. %s",
                number,
                len(counted),
                len(asked),
                self.quorum,
                "Asking again." if attempt + 1 < _ATTEMPTS else "",
            )
        raise RoundError(
            f"Round {number}: fewer than {self.quorum} participants answered, {_ATTEMPTS} times; "
            f"{self.roster.describe()}.{self._last_problem} Start more nodes, or set a smaller "
            "quorum or a longer deadline."
        )

    def _ask(self, number: int) -> dict[int, int]:
        """Return the node of each participant to ask, once enough are connected."""
        first, last_note = time.monotonic(), -math.inf
        while True:
            self.roster.refresh()
            connected = self.roster.participants()
            # The first round waits for all nodes: a rerun has the same cohorts.
            wanted = self.quorum if number else self.program.size
            waited = time.monotonic() - first
            if len(connected) >= wanted and (number or not self.roster.is_greeting):
                break
            if waited > self.rules.wait:
                if len(connected) >= self.quorum:
                    break
                raise RoundError(
                    f"Round {number}: {len(connected)} participants are connected after "
                    f"{waited:.0f} s, expected at least {self.quorum}; {self.roster.describe()}. "
                    "Start more SuperNodes (in a simulation, --federation-config "
                    f"'num-supernodes={self.program.size}'), or set a smaller quorum."
                )
            if waited - last_note > _SECONDS_BETWEEN_HINTS / 2:
                last_note = waited
                size = self.program.settings.num_clients
                hint = (
                    f" In a simulation, --federation-config 'num-supernodes={size}' sets their "
                    "number."
                )
                self._log.info(
                    "Waiting for %d participants: %s.%s",
                    wanted,
                    self.roster.describe(),
                    "" if self.roster.is_greeting else hint,
                )
                if self.roster.is_greeting and waited > _SECONDS_BETWEEN_HINTS:
                    self._log.warning(
                        "Some nodes are connected and have not answered. %s", _IF_SLOW
                    )
            self._sleep(POLL_SECONDS)
        numbers = list(connected)
        if len(numbers) > self.program.size:
            sampler = ClientSampler(
                len(numbers), self.program.size, self.program.settings.cohort_seed
            )
            numbers = [numbers[i] for i in sorted(sampler.sample(number).tolist())]
        return {k: connected[k] for k in numbers}

    def _attempt(
        self, position: ServerPosition, key: str, asked: Mapping[int, int]
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Return the participants that were counted, and the results if they are a quorum."""
        artifact = self.program.artifact
        noise = draw_noise(artifact.manifest.get("noise", ()))  # of this attempt alone
        answering: list[int] = list(asked)
        index = {k: i for i, k in enumerate(asked)}

        def answer(request: StageRequest) -> tuple[Any, Any, list[int]] | None:
            nonlocal answering
            shared = encode_list(request.shared)
            packets = {}
            for k in answering:
                rows = encode_list([x[index[k]] for x in request.rows])
                values = {
                    "kind": "train",
                    "program": self.program.program,
                    "run": self.run,
                    "key": key,
                    "round": position.round,
                    "stage": request.stage,
                    "counted": position.counted.get(k, ""),
                    "participant": k,
                    "index": index[k],
                    "seed": self.seed,
                }
                if self._secure is not None:
                    values |= self._secure.values(len(answering))
                packets[k] = Packet(values, [shared, rows])
            answering, merged = self._sum(request.stage, asked, packets)
            if merged is None or len(answering) < self.quorum:
                self._check_repeatable(position.round, request.stage)
                return None
            return *merged, [index[k] for k in answering]

        results = drive(artifact.run({**position.state, **noise}), answer)
        return answering, results

    def _check_repeatable(self, number: int, stage: int) -> None:
        """Raise if a round has opened a private sum, before too few answered a later stage."""
        manifest = self.program.artifact.manifest
        noises = [each["noise"] for each in manifest["stages"]]
        if has_opened_noise(manifest.get("noisy_request"), noises, stage):
            raise RoundError(
                f"Round {number}: fewer than {self.quorum} participants answered stage {stage}, "
                "and an earlier stage has opened a private sum. The same round again would spend "
                "its epsilon twice, which the metric does not count. To accept it, start the run "
                "again with resume=true."
            )

    def _sum(
        self, stage: int, asked: Mapping[int, int], packets: Mapping[int, Packet]
    ) -> tuple[list[int], tuple[Sequence[Any], Sequence[Any]] | None]:
        """Return the participants that answered a stage, and their merged terms and shown rows."""
        if self._secure is None:
            answers = self._exchange({k: (asked[k], packet) for k, packet in packets.items()})
            answering = sorted(answers)
            return answering, self._merge(stage, [answers[k] for k in answering])
        participant = {asked[k]: k for k in packets}
        described = self.program.artifact.manifest["stages"][stage]["terms"]
        nodes, terms = self._secure(
            {asked[k]: packet for k, packet in packets.items()},
            described,
            self.quorum,
            self.rules.deadline or None,
        )
        if self._secure.problem:
            self._last_problem = f" {self._secure.problem}"
        answering = sorted(participant[node] for node in nodes)
        self.roster.greet_again(participant.keys() - set(nodes))
        return answering, (terms, []) if nodes else None

    def _merge(self, stage: int, answers: Sequence[Packet]) -> tuple[Sequence[Any], list[Any]]:
        """Merge terms in the order of participants: a rerun gives the same bits."""
        if not answers:
            return (), []
        decoded = [[decode_list(x) for x in answer.arrays] for answer in answers]
        terms, shown = zip(*decoded, strict=True)
        merged = functools.reduce(self.program.artifact.merge(stage), terms)
        return merged, [jnp.stack(rows) for rows in zip(*shown, strict=True)]

    def _exchange(self, packets: Mapping[int, tuple[int, Packet]]) -> dict[int, Packet]:
        """Send a packet to each participant; return the answers that came in time."""
        participant = {node: k for k, (node, _) in packets.items()}
        deadline = self.rules.deadline or None
        sent = self.network.push(dict(packets.values()), deadline)
        waiting = {message: participant[node] for message, node in sent.items()}
        enough = min(self.rules.enough or len(packets), len(packets))
        answers: dict[int, Packet] = {}
        first, last_note = time.monotonic(), 0.0
        while waiting and len(answers) < enough:
            for reply in self.network.pull(list(waiting)):
                k = waiting.pop(reply.message, None)  # None: an answer that was read before
                if k is None:
                    continue
                problem = problem_of(reply, self.program, packets[k][1].values["stage"])
                if problem:
                    self._log.warning("Participant %d: %s", k, problem)
                    self._last_problem = f" Participant {k}: {problem}"
                    self.roster.greet_again([packets[k][0]])
                elif reply.packet is not None:
                    answers[k] = reply.packet
            waited = time.monotonic() - first
            if deadline and waited > deadline:
                late = sorted(waiting.values())
                self._log.warning("Not in time, after %.0f s: participants %s", waited, late)
                break
            if waiting and waited - last_note > _SECONDS_BETWEEN_HINTS:
                last_note = waited
                self._log.warning(
                    "No answer after %.0f s from participants %s. %s",
                    waited,
                    sorted(waiting.values()),
                    _IF_SLOW,
                )
            if waiting and len(answers) < enough:
                self._sleep(POLL_SECONDS)
        if len(answers) < enough:
            self.roster.greet_again(packets[k][0] for k in waiting.values())
        return answers


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a round that are one number, as floats."""
    return {
        name.strip("[]'\"."): float(np.asarray(value))
        for name, value in metrics.items()
        if np.ndim(value) == 0
    }


def problem_of(reply: NodeReply, program: RoundProgram, stage: int) -> str:
    """Say why an answer cannot be counted, or return an empty string."""
    if reply.packet is None:
        return one_line(reply.error)
    values = reply.packet.values
    if "refusal" in values:
        return one_line(values["refusal"])
    if values.get("program") != program.program:
        return f"answers with program {one_line(values.get('program'))[:12]}"
    try:
        groups = [decode_values(content).values() for content in reply.packet.arrays]
    except ValueError as error:
        return one_line(error)
    types = [[(list(x.shape), str(x.dtype)) for x in group] for group in groups]
    described = program.artifact.manifest["stages"][stage]
    expected = [[(v["shape"], v["dtype"]) for v in described[k]] for k in ("terms", "shown")]
    if types != expected:
        return f"answers with arrays of other types than the {len(expected[0])} terms of the stage"
    for i, (value, term) in enumerate(zip(described["terms"], groups[0], strict=True)):
        finite = np.isfinite(term)
        # The maximum of nothing is -inf.
        if not np.all(finite) and np.any(~finite & (term != program.artifact.empty(stage)[i])):
            return (
                f"answers with NaN or infinity in {value['name']}, which would be the "
                "result of the round. Set a smaller learning rate, or look at its data"
            )
    return ""

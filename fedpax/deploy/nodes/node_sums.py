"""Secure sums of nodes by fedpax's own protocol, `fedpax.secure_sums`.

Participants believe the server which public key belongs to which of them.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.deploy.nodes.node_roster import Network
from fedpax.deploy.packets import Packet, one_line
from fedpax.errors import ArgumentError
from fedpax.files import check_nesting
from fedpax.secure_sums.arithmetic import (
    WORDS,
    NotSummableError,
    SecureSumError,
    from_words,
    to_words,
)
from fedpax.secure_sums.asked import AskedStages
from fedpax.secure_sums.coordinator_side import CoordinatorSide
from fedpax.secure_sums.message import Message
from fedpax.secure_sums.roster import MAX_SITES
from fedpax.secure_sums.site_side import SiteSums, UnknownSumError

LEAST_PARTICIPANTS = 3
"""Of a sum of two, each of them learns the other's terms."""


def check_program(program: Any, quorum: int, least: int = 2, most: int | None = None) -> None:
    """Raise an ArgumentError if a program sends anything else than terms of sums."""
    if most is not None and program.size > most:
        raise ArgumentError(
            f"secure=true with {program.size} participants in a round, expected at most {most}: "
            "each of them gets a share of each other one's secrets. Export again with a smaller "
            'cohort, or secure-protocol="secagg+".'
        )
    if 2 * quorum <= program.size:
        raise ArgumentError(
            f"secure=true with quorum={quorum} of {program.size}, expected more than half: the "
            "quorum's shares open the masks. Set a larger quorum."
        )
    if program.size < LEAST_PARTICIPANTS:
        raise ArgumentError(
            f"secure=true with {program.size} participants in a round, expected at least "
            f"{LEAST_PARTICIPANTS}: with fewer, the sum tells each its neighbour's terms."
        )
    if quorum < least:
        raise ArgumentError(
            f"secure=true with quorum={quorum}, expected at least {least}: from a sum of two, each "
            'learns the other\'s terms. Set a larger quorum, or secure-protocol="secagg+".'
        )
    random = np.random.default_rng(0)
    for number, stage in enumerate(program.artifact.manifest["stages"]):
        if stage["shown"]:
            raise ArgumentError(
                f"secure=true, but the server reads {stage['shown'][0]['name']} of each "
                "participant, expected a program that sends sums and means alone. Use the "
                "aggregator mean(), or secure=false."
            )
        some, others = (
            [(8 * random.normal(size=t["shape"])).astype(t["dtype"]) for t in stage["terms"]]
            for _ in range(2)
        )
        merged = program.artifact.merge(number)(some, others)
        for term, a, b, c in zip(stage["terms"], some, others, merged, strict=True):
            if not np.allclose(np.asarray(c, np.float64), a.astype(np.float64) + b, atol=1e-1):
                raise ArgumentError(
                    f"secure=true, but {term['name']} is not a sum, expected a program that sends "
                    "sums and means alone. Use other reductions, or secure=false."
                )


def check_masks(program: Any, quorum: int, *, is_secure: bool) -> None:
    """Raise an ArgumentError if a program needs masks, and the run opens sums without them."""
    least = program.artifact.manifest["least_masked"]
    if least is None:
        return
    if not is_secure:
        raise ArgumentError(
            "secure=false, but the program has secure_mean() or private_secure_mean(), whose terms "
            "must be masked. Run with --run-config 'secure=true'."
        )
    if quorum < least:
        raise ArgumentError(
            f"quorum={quorum}, expected at least min_participants={least}, with which the noise of "
            "private_secure_mean() has the stated size. Set a larger quorum, or export again with "
            "a smaller min_participants."
        )


_OF_ONE = frozenset(("config", "counted", "index", "participant", "request", "session"))
"""Values of a packet that differ between participants, or that all masks are bound to anyway."""


def _asked(stages: AskedStages, packet: Packet) -> bytes:
    """Return the digest of what all participants are asked in a stage."""
    key, stage = str(packet.values["key"]), int(packet.values["stage"])
    shared = {"shared": np.frombuffer(packet.arrays[0], np.uint8)}
    return stages.add(key, stage, packet.values, shared)


KIND = "sum"
"""The kind of packets that carry no terms."""


class NodeSums:
    """A node's part in secure sums."""

    def __init__(self, least: int) -> None:
        self._sums = SiteSums(max(least, LEAST_PARTICIPANTS))
        self._stages = AskedStages(_OF_ONE)

    def answer(
        self,
        packet: Packet,
        terms: Sequence[Any] | None = None,
        before_opening: Callable[[], None] = lambda: None,
    ) -> Packet:
        """Answer a packet of a sum."""
        values, asked = packet.values, b"" if terms is None else _asked(self._stages, packet)
        name, session = str(values["participant"]), str(values["session"])
        request = json.loads(str(values["request"]))
        is_reveal = isinstance(request, dict) and request.get("phase") == "reveal"
        if is_reveal and self._sums.knows(name, session):
            before_opening()

        def encode() -> dict[str, np.ndarray]:
            return {str(i): to_words(x) for i, x in enumerate(terms or ())}

        try:
            encoded = None if terms is None else encode
            answer = self._sums.answer(name, session, request, encoded, asked)
        except UnknownSumError as error:
            raise SecureSumError(
                f"{error}, or another one has its secrets, as in a simulation: there, run with "
                "--run-config 'secure-protocol=\"secagg+\"'"
            ) from error
        except NotSummableError as error:
            raise SecureSumError(f"a term of this participant cannot be summed: {error}") from error
        arrays = [encode_values(dict(answer.arrays))] if answer.arrays else []
        return Packet({"answer": json.dumps(dict(answer.header))}, arrays)


class ServerSums:
    """The server's part in secure sums."""

    least, problem = LEAST_PARTICIPANTS, ""
    most: int | None = MAX_SITES

    def __init__(self, network: Network, log: logging.Logger, poll_seconds: float) -> None:
        self._network, self._log, self._poll_seconds = network, log, poll_seconds
        self._stages = AskedStages(_OF_ONE)

    def values(self, participants: int) -> dict[str, Any]:
        """Return what a packet says for a secure sum."""
        del participants
        return {}

    def __call__(
        self,
        packets: Mapping[int, Packet],
        terms: Sequence[Mapping[str, Any]],
        quorum: int,
        seconds: float | None,
    ) -> tuple[list[int], list[Any]]:
        """Sum the terms of nodes, as `round_server.SecureSum` says."""
        # Each attempt has its own session: a participant masks its terms once in a session.
        session = secrets.token_hex(16)
        nodes = {str(packet.values["participant"]): node for node, packet in packets.items()}
        shapes = {str(i): (*t["shape"], WORDS) for i, t in enumerate(terms)}
        asked = _asked(self._stages, next(iter(packets.values())))
        try:
            side = CoordinatorSide(
                session, list(nodes), threshold=quorum, shapes=shapes, asked=asked
            )
            requests: dict[str, Message | None] = dict.fromkeys(nodes)
            while not side.done:
                parts = {
                    nodes[name]: _request(packets[nodes[name]], side.phase, session, request)
                    for name, request in requests.items()
                }
                for node, reply in self._exchange(parts, seconds).items():
                    try:
                        name = str(packets[node].values["participant"])
                        side.receive(name, _read(reply))
                    except SecureSumError as error:
                        self._log.warning(
                            "A participant is left out of the sum: %s", one_line(error)
                        )
                try:
                    requests = dict(side.advance())
                finally:
                    for name, reason in side.suspects.items():
                        words = "Participant %s does not keep to the protocol: %s"
                        self._log.warning(words, name, reason)
        except SecureSumError as error:
            self._log.warning("No secure sum: %s", error)
            return [], []
        total = [
            from_words(side.total[str(i)], np.dtype(t["dtype"])).reshape(t["shape"])
            for i, t in enumerate(terms)
        ]
        return sorted(nodes[name] for name in side.present), total

    def _exchange(self, packets: Mapping[int, Packet], seconds: float | None) -> dict[int, Packet]:
        """Send packets; return the answers that come in time."""
        waiting = self._network.push(packets, seconds)
        answers: dict[int, Packet] = {}
        first = time.monotonic()
        while waiting and (seconds is None or time.monotonic() - first < seconds):
            for reply in self._network.pull(list(waiting)):
                node = waiting.pop(reply.message, None)
                if node is None:
                    continue
                problem: Any = reply.error
                if reply.packet is not None:
                    problem = reply.packet.values.get("refusal")
                if reply.packet is None or problem is not None:
                    self.problem = f"Node {node} takes no part in the sum: {one_line(problem)}"
                    self._log.warning("%s", self.problem)
                else:
                    answers[node] = reply.packet
            if waiting:
                time.sleep(self._poll_seconds)
        return answers


def _request(packet: Packet, phase: str, session: str, request: Message | None) -> Packet:
    """Return the packet of a phase: terms are masked as the answer to the packet of the stage."""
    header = json.dumps(None if request is None else dict(request.header))
    values = {**packet.values, "session": session, "request": header}
    return Packet(values, packet.arrays) if phase == "mask" else Packet({**values, "kind": KIND})


def _read(packet: Packet) -> Message:
    """Return the message of a participant's answer."""
    try:
        header = json.loads(str(packet.values["answer"]))
        check_nesting(header)
        arrays = decode_values(packet.arrays[0]) if packet.arrays else {}
    except (KeyError, ValueError, RecursionError) as error:
        raise SecureSumError(f"its answer is malformed ({str(error)[:200]})") from error
    if not isinstance(header, dict):
        raise SecureSumError("its answer is malformed (it is not a dict)")
    return Message(header, {name: np.asarray(x) for name, x in arrays.items()})

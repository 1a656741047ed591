"""Who takes part in rounds on nodes: the connected nodes that run the same program."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from fedpax.deploy.packets import Packet, one_line
from fedpax.deploy.round_program import RoundProgram
from fedpax.errors import ArgumentError


class NodeReply(NamedTuple):
    """What came back for a message: a packet, or the error in the words of the network."""

    message: str
    packet: Packet | None
    error: str = ""


class Network(Protocol):
    """Carries packets to nodes: Flower's grid, or a test's."""

    def nodes(self) -> Iterable[int]:
        """Return the ids of the nodes that are connected."""
        ...

    def push(self, packets: Mapping[int, Packet], seconds: float | None) -> dict[str, int]:
        """Send a packet to each node; return the node of each message that was sent."""
        ...

    def pull(self, messages: Iterable[str]) -> Iterable[NodeReply]:
        """Return the replies that are there."""
        ...


class NodeRoster:
    """The participants that are connected, each with a node that runs the same program."""

    def __init__(self, network: Network, program: RoundProgram, log: logging.Logger) -> None:
        self._network, self._program, self._log = network, program, log
        self._greetings: dict[str, int] = {}
        self._asked: set[int] = set()
        self._partitions: dict[int, int] = {}  # node -> its own number, or -1
        self._numbers: dict[int, int] = {}  # node -> number, without partition ids
        self._refusals: dict[int, str] = {}

    def refresh(self) -> None:
        """Greet new nodes, forget nodes that left, and read the answers to greetings."""
        nodes = set(self._network.nodes())
        for node in self._partitions.keys() - nodes:
            del self._partitions[node]
        self._asked &= nodes
        if new := sorted(nodes - self._asked):
            greeting = Packet({"kind": "greeting", "program": self._program.program})
            self._greetings |= self._network.push(dict.fromkeys(new, greeting), None)
            self._asked.update(new)
        self._greetings = {m: node for m, node in self._greetings.items() if node in nodes}
        for reply in self._network.pull(self._greetings) if self._greetings else ():
            if reply.message not in self._greetings:
                continue
            node = self._greetings.pop(reply.message)
            if reply.packet is None or "refusal" in reply.packet.values:
                self.refuse(node, reply)
                continue
            self._partitions[node] = int(reply.packet.values["partition"])
            self._refusals.pop(node, None)

    @property
    def is_greeting(self) -> bool:
        """Whether a connected node has not answered its greeting."""
        return bool(self._greetings)

    def refuse(self, node: int, reply: NodeReply) -> None:
        """Note why a node takes no part."""
        words = one_line(reply.error if reply.packet is None else reply.packet.values["refusal"])
        self._refusals[node] = words
        self._log.warning("Node %d takes no part: %s", node, words)

    def greet_again(self, nodes: Iterable[int]) -> None:
        """Take nodes off the roster until they answer a new greeting."""
        for node in nodes:
            self._partitions.pop(node, None)
            self._asked.discard(node)

    def participants(self) -> dict[int, int]:
        """Return the node of each participant, in the order of their numbers."""
        if all(k < 0 for k in self._partitions.values()):
            return self._numbered()
        remedy = (
            "Start each flower-supernode with its own number: --node-config 'partition-id=0', 1, "
            "and so on."
        )
        node_of: dict[int, int] = {}
        for node, k in sorted(self._partitions.items(), key=lambda item: (item[1], item[0])):
            if k < 0:
                raise ArgumentError(f"Node {node} has no partition-id, and others have. {remedy}")
            if k in node_of:
                raise ArgumentError(
                    f"The nodes {node_of[k]} and {node} both have partition-id={k}. {remedy}"
                )
            if k < self._program.settings.num_clients:
                node_of[k] = node
        return node_of

    def _numbered(self) -> dict[int, int]:
        """Give nodes without partition-id numbers while they are connected."""
        self._numbers = {n: k for n, k in self._numbers.items() if n in self._partitions}
        taken = set(self._numbers.values())
        free = (k for k in range(self._program.settings.num_clients) if k not in taken)
        new = sorted(self._partitions.keys() - self._numbers.keys())
        self._numbers.update(zip(new, free, strict=False))
        return {k: node for node, k in sorted(self._numbers.items(), key=lambda item: item[1])}

    def describe(self) -> str:
        """Say how many nodes take part, and why others do not."""
        words = f"{len(self._partitions)} nodes take part"
        if self._refusals:
            words += f", {len(self._refusals)} refuse: {next(iter(self._refusals.values()))}"
        elif self._greetings:
            words += f", {len(self._greetings)} have not answered"
        return words

"""SecAgg+ on Flower: the server learns the sum of the participants' terms, and no single one.

Bell et al., CCS 2020, IACR 2020/704.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedpax.deploy.nodes.vectors import MODULUS, from_vector, range_of
from fedpax.deploy.packets import Packet, one_line

_LOG = logging.getLogger("flwr")


def answer(message: Any, context: Any, compute: Callable[[Packet], Packet]) -> Any:
    """Return a participant's answer to a message of SecAgg+; `compute` makes its vector."""
    from flwr.app import Message
    from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_STATE
    from flwr.compat.common import recorddict_compat

    def masked(message: Any, context: Any) -> Any:
        packet = read_record(message.content)
        threshold = int(context.state.config_records[RECORD_KEY_STATE]["threshold"])
        values = {**packet.values, "secure_threshold": threshold}
        reply = compute(packet._replace(values=values))
        if "refusal" in reply.values:
            raise RuntimeError(reply.values["refusal"])
        vector = np.load(io.BytesIO(reply.arrays[0]), allow_pickle=False)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, {})
        return Message(recorddict_compat.fitres_to_recorddict(result, False), reply_to=message)

    return secaggplus_mod(message, context, masked)


def is_secure(message: Any) -> bool:
    """Tell whether a message belongs to SecAgg+."""
    return "secaggplus_configs" in message.content.config_records


def answer_unmasked(packet: Packet, compute: Callable[[Packet], Packet]) -> Packet:
    """Return a participant's answer to a message outside of SecAgg+, but for what is masked."""
    if "secure_bound" in packet.values:
        return Packet(
            {
                "refusal": "The server asks for a vector of SecAgg+ without its masks, expected "
                "messages of SecAgg+. Use the same version of fedpax on both sides."
            }
        )
    return compute(packet)


class SecAggSum:
    """The server's side of SecAgg+: sums the terms of a stage."""

    least, problem = 2, ""
    most: int | None = None

    def __init__(self, grid: Any, bound: float, poll_seconds: float) -> None:
        self._grid, self.bound, self._poll_seconds = grid, bound, poll_seconds

    def values(self, participants: int) -> dict[str, Any]:
        """Return what a packet says for a secure sum."""
        return {"secure_bound": self.bound, "secure_levels": range_of(participants)}

    def __call__(
        self,
        packets: Mapping[int, Packet],
        terms: Sequence[Mapping[str, Any]],
        quorum: int,
        seconds: float | None,
    ) -> tuple[list[int], list[Any]]:
        """Sum the terms of nodes, as `round_server.SecureSum` says."""
        from flwr.app import ConfigRecord
        from flwr.common import parameters_to_ndarrays
        from flwr.server.workflow import SecAggPlusWorkflow
        from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

        levels = range_of(len(packets))
        workflow = SecAggPlusWorkflow(
            1.0,
            max(2, quorum),
            max_weight=1.0,
            clipping_range=float(self.bound),
            quantization_range=levels,
            modulus_range=MODULUS,
            timeout=seconds,
        )
        strategy = _KeepMean()
        strategy.nodes = list(packets)
        context: Any = SimpleNamespace(
            state=SimpleNamespace(
                config_records={"config": ConfigRecord({"current_round": 1})},
                array_records=_NoParameters(),
            ),
            strategy=strategy,
            client_manager=SimpleNamespace(num_available=lambda: len(packets)),
            history=SimpleNamespace(add_metrics_distributed_fit=lambda **_: None),
        )
        state, grid = WorkflowState(), _Matching(self._grid, self._poll_seconds, self)
        if not workflow.setup_stage(grid, context, state):
            return [], []
        state.nid_to_fitins = {node: write_record(packet) for node, packet in packets.items()}
        for stage in (workflow.share_keys_stage, workflow.collect_masked_vectors_stage):
            if not stage(grid, context, state):
                return [], []
        counted = sorted(state.active_node_ids)
        if len(counted) < quorum or not workflow.unmask_stage(grid, context, state):
            return [], []
        (mean,) = parameters_to_ndarrays(strategy.mean)
        return counted, from_vector(mean * len(counted), terms, self.bound, levels)


class _NoParameters(dict[str, Any]):
    """Parameters that Flower's workflow reads, and that no message needs."""

    def __missing__(self, key: str) -> Any:
        from flwr.app import ArrayRecord

        return ArrayRecord()


class _KeepMean:
    """The strategy that Flower's workflow calls: it keeps the mean."""

    mean: Any = None
    nodes: Sequence[int] = ()

    def configure_fit(self, number: int, parameters: Any, manager: Any) -> list[Any]:
        """Return the instructions of each node, which the packets replace."""
        from flwr.common import FitIns

        return [(SimpleNamespace(node_id=node), FitIns(parameters, {})) for node in self.nodes]

    def aggregate_fit(
        self, number: int, results: Any, failures: Any
    ) -> tuple[None, dict[str, Any]]:
        self.mean = results[0][1].parameters
        return None, {}


class _Matching:
    """A grid that polls often, ends at the deadline, and matches replies by their message."""

    def __init__(self, grid: Any, poll_seconds: float, sums: SecAggSum) -> None:
        self._grid, self._poll_seconds, self._sums = grid, poll_seconds, sums

    def send_and_receive(self, messages: Sequence[Any], *, timeout: float | None) -> list[Any]:
        """Send messages; return the replies that came in time."""
        sent = [m for m in self._grid.push_messages(messages) if m]
        waiting, replies = set(sent), []
        first = time.monotonic()
        while waiting and (timeout is None or time.monotonic() - first < timeout):
            for message in self._grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    waiting.discard(message.metadata.reply_to_message_id)
                    replies.append(message)
                    if message.has_error():
                        self._sums.problem = f"A participant: {one_line(message.error.reason)}"
                        _LOG.warning("%s", self._sums.problem)
            if waiting:
                time.sleep(self._poll_seconds)
        return replies


def write_record(packet: Packet) -> Any:
    """Return a packet as a `flwr.app.RecordDict`."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {
        str(i): Array("uint8", (len(content),), "fedpax", content)
        for i, content in enumerate(packet.arrays)
    }
    return RecordDict({"values": ConfigRecord(dict(packet.values)), "arrays": ArrayRecord(arrays)})


def read_record(record: Any) -> Packet:
    """Return the packet of a `flwr.app.RecordDict`."""
    arrays = record["arrays"]
    return Packet(dict(record["values"]), [arrays[str(i)].data for i in range(len(arrays))])

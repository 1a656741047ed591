"""Packets as the records of Flower's messages."""

from typing import Any

from fedpax.deploy.packets import Packet


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

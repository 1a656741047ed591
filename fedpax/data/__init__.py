"""Data: sources by name, partitions among participants, and endless streams of rounds.

A source is whatever has a length and gives a dict of an example's fields at an index; ``load``
makes one of any TFDS name, two of which every machine can prepare from what it has. A stream
gives the batches of one round after another and can say where it stands, so that a run that was
stopped goes on with the very batches that it would have seen.
"""

from fedpax.data.example_rounds import ExampleRounds, example_rounds, read_examples
from fedpax.data.heldout import heldout_batches
from fedpax.data.packing import pack
from fedpax.data.partition import partition_by_field, partition_iid
from fedpax.data.source import Source, load
from fedpax.data.token_rounds import TokenRounds, token_rounds
from fedpax.data.tokens import SEPARATOR, VOCABULARY, decode, encode

__all__ = [
    "SEPARATOR",
    "VOCABULARY",
    "ExampleRounds",
    "Source",
    "TokenRounds",
    "decode",
    "encode",
    "example_rounds",
    "heldout_batches",
    "load",
    "pack",
    "partition_by_field",
    "partition_iid",
    "read_examples",
    "token_rounds",
]

"""Data: sources by name, partitions among participants, and endless streams of rounds.

A source is whatever has a length and gives a dict of an example's fields at an index; ``load``
makes one of any TFDS name, two of which every machine can prepare from what it has, and of the
federated standards, which come with their clients. A stream gives the batches of one round after
another and can say where it stands, so that a run that was stopped goes on with the very batches
that it would have seen.
"""

from fedpax.data.populations.client_sampler import ClientSampler
from fedpax.data.populations.label_skew import (
    partition_by_shards,
    partition_dirichlet,
    partition_pachinko,
)
from fedpax.data.populations.partition import partition_by_field, partition_iid, partition_natural
from fedpax.data.populations.partition_plot import plot_partition
from fedpax.data.populations.partition_statistics import PartitionStatistics, partition_statistics
from fedpax.data.populations.quantity_skew import partition_by_quantity
from fedpax.data.populations.scheduling import balanced_order, idle_fraction
from fedpax.data.populations.synthetic_clients import DirichletClients
from fedpax.data.rounds.cohort_rounds import CohortRounds, cohort_rounds
from fedpax.data.rounds.example_rounds import ExampleRounds, example_rounds, read_examples
from fedpax.data.rounds.heldout import heldout_batches
from fedpax.data.rounds.stream import Deferred
from fedpax.data.rounds.token_rounds import TokenRounds, token_round_shapes, token_rounds
from fedpax.data.sources.source import Source, load
from fedpax.data.text.byte_tokenizer import SEPARATOR, VOCAB_SIZE, decode, encode
from fedpax.data.text.packing import pack
from fedpax.data.text.tokenizer import (
    BYTE_TOKENIZER,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)

__all__ = [
    "BYTE_TOKENIZER",
    "SEPARATOR",
    "VOCAB_SIZE",
    "ClientSampler",
    "CohortRounds",
    "Deferred",
    "DirichletClients",
    "ExampleRounds",
    "PartitionStatistics",
    "Source",
    "TokenRounds",
    "Tokenizer",
    "balanced_order",
    "cohort_rounds",
    "decode",
    "encode",
    "example_rounds",
    "heldout_batches",
    "idle_fraction",
    "load",
    "load_tokenizer",
    "pack",
    "partition_by_field",
    "partition_by_quantity",
    "partition_by_shards",
    "partition_dirichlet",
    "partition_iid",
    "partition_natural",
    "partition_pachinko",
    "partition_statistics",
    "plot_partition",
    "read_examples",
    "token_round_shapes",
    "token_rounds",
    "train_tokenizer",
]

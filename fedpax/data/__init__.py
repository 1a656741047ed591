"""Data: sources by name or from files, populations, endless streams of cohorts, and text.

- Sources: `load(name, split)` opens a data set (TFDS, embedded or federated), and `load(files,
  client=...)` a user's files, which `prepare` sorts once if they exceed the memory. A source is a
  sequence of dicts, such as a list.
- Populations: the `partition_...` functions divide a source's examples among participants,
  `concatenate_clients` takes a list of clients' arrays, `DirichletClients`, `logistic_clients`
  and `leaf_clients` generate clients, and `ClientSampler` samples the clients of each round.
- Rounds: `cohort_rounds`, `example_rounds` (labeled images) and `token_rounds` (text, also from a
  `Mixture`) are endless streams that yield one `fedpax.Cohort` per round, and that resume at a
  saved position. `FunctionRounds` makes a stream from a function of the round's number.
  `unreliable_rounds` adds clients that drop out and rounds with a deadline.
- Evaluation: `read_examples` and `example_batches` (labeled images) and `heldout_token_batches`
  (text) return finite data.
- Text: `load_tokenizer` and `train_tokenizer`; `pack` makes rows of equal length from documents.
  `Conversation` names prompts with answers, or chat messages in the form of `load_chat_template`.
"""

from fedpax.data.loading import load, prepare
from fedpax.data.rounds.augmentation import add_dropout_seeds
from fedpax.data.rounds.cohort_rounds import cohort_rounds
from fedpax.data.rounds.cohort_stream import CohortRounds
from fedpax.data.rounds.example_rounds import ExampleRounds, example_rounds
from fedpax.data.rounds.heldout_tokens import heldout_token_batches
from fedpax.data.rounds.labeled_examples import example_batches, read_examples
from fedpax.data.rounds.mixture import Mixture
from fedpax.data.rounds.scheduling import balanced_order, idle_fraction
from fedpax.data.rounds.stream_parts import FunctionRounds, LazyStream, LocalRows, addressable_rows
from fedpax.data.rounds.token_rounds import token_round_shapes, token_rounds
from fedpax.data.rounds.token_stream import TokenRounds
from fedpax.data.rounds.unreliable_rounds import RoundOutcome, UnreliableRounds, unreliable_rounds
from fedpax.populations.client_arrays import (
    ContiguousClients,
    DailyAvailability,
    RecordedAvailability,
    concatenate_clients,
)
from fedpax.populations.client_sampler import ClientSampler, poisson_cohort_size
from fedpax.populations.label_skew import (
    partition_by_quantity,
    partition_by_shards,
    partition_dirichlet,
    partition_pachinko,
)
from fedpax.populations.partition import (
    Partition,
    partition_by_field,
    partition_iid,
    partition_natural,
)
from fedpax.populations.partition_plot import plot_partition
from fedpax.populations.partition_statistics import PartitionStatistics, partition_statistics
from fedpax.populations.synthetic_clients import DirichletClients, leaf_clients, logistic_clients
from fedpax.sources.source import Source
from fedpax.text.chat_template import ChatTemplate, load_chat_template
from fedpax.text.conversation import Conversation
from fedpax.text.packing import pack
from fedpax.text.tokenizer import (
    BYTE_TOKENIZER,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from fedpax.text.tokenizer_json import SEPARATOR, VOCAB_SIZE, decode, encode

__all__ = [
    "BYTE_TOKENIZER",
    "SEPARATOR",
    "VOCAB_SIZE",
    "ChatTemplate",
    "ClientSampler",
    "CohortRounds",
    "ContiguousClients",
    "Conversation",
    "DailyAvailability",
    "DirichletClients",
    "ExampleRounds",
    "FunctionRounds",
    "LazyStream",
    "LocalRows",
    "Mixture",
    "Partition",
    "PartitionStatistics",
    "RecordedAvailability",
    "RoundOutcome",
    "Source",
    "TokenRounds",
    "Tokenizer",
    "UnreliableRounds",
    "add_dropout_seeds",
    "addressable_rows",
    "balanced_order",
    "cohort_rounds",
    "concatenate_clients",
    "decode",
    "encode",
    "example_batches",
    "example_rounds",
    "heldout_token_batches",
    "idle_fraction",
    "leaf_clients",
    "load",
    "load_chat_template",
    "load_tokenizer",
    "logistic_clients",
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
    "poisson_cohort_size",
    "prepare",
    "read_examples",
    "token_round_shapes",
    "token_rounds",
    "train_tokenizer",
    "unreliable_rounds",
]

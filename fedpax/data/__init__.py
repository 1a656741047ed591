"""Data: sources by name or from files, populations, endless streams of cohorts, and text.

- Sources: `load(name, split)` opens a data set (TFDS, embedded or federated), and `load(files,
  client=...)` a user's files, which `prepare` sorts once if they exceed the memory. A source is a
  sequence of dicts, such as a list.
- Populations: the `partition_...` functions divide a source's examples among participants,
  `concatenate_clients` takes a list of clients' arrays, `DirichletClients`, `logistic_clients`
  and `leaf_clients` generate clients, and `ClientSampler` samples the clients of each round.
- Rounds: `cohort_rounds`, `example_rounds` (labeled images) and `token_rounds` (text, also from a
  `Mixture`) are endless streams that yield one `fedpax.Cohort` per round, and that resume at a
  saved position. `FunctionRounds` makes a stream from a function of the round's number,
  and `ScheduledRounds` changes each cohort by such a function.
  `unreliable_rounds` adds clients that drop out and rounds with a deadline.
- Evaluation: `read_examples` and `example_batches` (labeled images) and `heldout_token_batches`
  (text) return finite data.
- Text: `load_tokenizer` and `train_tokenizer`; `pack` makes rows of equal length from documents.
  `Conversation` names prompts with answers, or chat messages in the form of `load_chat_template`.
"""

from fedpax.data.load import load as load
from fedpax.data.load import prepare as prepare
from fedpax.data.rounds.augmentation import add_dropout_seeds as add_dropout_seeds
from fedpax.data.rounds.cohort_rounds import cohort_rounds as cohort_rounds
from fedpax.data.rounds.cohort_stream import CohortRounds as CohortRounds
from fedpax.data.rounds.device_order import balanced_order as balanced_order
from fedpax.data.rounds.device_order import idle_fraction as idle_fraction
from fedpax.data.rounds.example_rounds import ExampleRounds as ExampleRounds
from fedpax.data.rounds.example_rounds import example_rounds as example_rounds
from fedpax.data.rounds.heldout_tokens import heldout_token_batches as heldout_token_batches
from fedpax.data.rounds.labeled_examples import example_batches as example_batches
from fedpax.data.rounds.labeled_examples import read_examples as read_examples
from fedpax.data.rounds.mixture import Mixture as Mixture
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds as ScheduledRounds
from fedpax.data.rounds.stream_parts import FunctionRounds as FunctionRounds
from fedpax.data.rounds.stream_parts import LazyStream as LazyStream
from fedpax.data.rounds.stream_parts import LocalRows as LocalRows
from fedpax.data.rounds.stream_parts import addressable_rows as addressable_rows
from fedpax.data.rounds.token_rounds import token_round_shapes as token_round_shapes
from fedpax.data.rounds.token_rounds import token_rounds as token_rounds
from fedpax.data.rounds.token_stream import TokenRounds as TokenRounds
from fedpax.data.rounds.unreliable_rounds import RoundOutcome as RoundOutcome
from fedpax.data.rounds.unreliable_rounds import UnreliableRounds as UnreliableRounds
from fedpax.data.rounds.unreliable_rounds import unreliable_rounds as unreliable_rounds
from fedpax.lazy_names import public_names as _public_names
from fedpax.populations.client_arrays import ContiguousClients as ContiguousClients
from fedpax.populations.client_arrays import DailyAvailability as DailyAvailability
from fedpax.populations.client_arrays import RecordedAvailability as RecordedAvailability
from fedpax.populations.client_arrays import concatenate_clients as concatenate_clients
from fedpax.populations.client_sampler import ClientSampler as ClientSampler
from fedpax.populations.client_sampler import poisson_cohort_size as poisson_cohort_size
from fedpax.populations.label_skew import partition_by_quantity as partition_by_quantity
from fedpax.populations.label_skew import partition_by_shards as partition_by_shards
from fedpax.populations.label_skew import partition_dirichlet as partition_dirichlet
from fedpax.populations.label_skew import partition_pachinko as partition_pachinko
from fedpax.populations.partition import Partition as Partition
from fedpax.populations.partition import partition_by_field as partition_by_field
from fedpax.populations.partition import partition_iid as partition_iid
from fedpax.populations.partition import partition_natural as partition_natural
from fedpax.populations.partition_plot import plot_partition as plot_partition
from fedpax.populations.partition_statistics import PartitionStatistics as PartitionStatistics
from fedpax.populations.partition_statistics import partition_statistics as partition_statistics
from fedpax.populations.synthetic_clients import DirichletClients as DirichletClients
from fedpax.populations.synthetic_clients import leaf_clients as leaf_clients
from fedpax.populations.synthetic_clients import logistic_clients as logistic_clients
from fedpax.sources.source import Source as Source
from fedpax.text.chat_template import ChatTemplate as ChatTemplate
from fedpax.text.chat_template import load_chat_template as load_chat_template
from fedpax.text.conversation import Conversation as Conversation
from fedpax.text.packing import pack as pack
from fedpax.text.tokenizer import BYTE_TOKENIZER as BYTE_TOKENIZER
from fedpax.text.tokenizer import Tokenizer as Tokenizer
from fedpax.text.tokenizer import load_tokenizer as load_tokenizer
from fedpax.text.tokenizer import train_tokenizer as train_tokenizer
from fedpax.text.tokenizer_json import SEPARATOR as SEPARATOR
from fedpax.text.tokenizer_json import VOCAB_SIZE as VOCAB_SIZE
from fedpax.text.tokenizer_json import decode as decode
from fedpax.text.tokenizer_json import encode as encode

__all__ = _public_names(globals())

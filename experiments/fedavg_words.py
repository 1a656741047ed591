"""FedAvg and FedOpt on sentences of words: next-word prediction by a recurrent network."""

import abc
import dataclasses
import itertools
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

from fedpax import Cohort
from fedpax.algorithm import LossFn, Params
from fedpax.checks import Count
from fedpax.clients.cohort import CohortStream
from fedpax.data import ClientSampler, CohortRounds, Partition, Source, partition_natural
from fedpax.data.rounds.labeled_examples import Preprocess
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.data.rounds.stream_parts import evenly_spaced
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.experiments.client_experiment import FedAvgExperiment
from fedpax.experiments.parts.client_evaluation import (
    EvaluateClients,
    masked_loss_by_client,
    owners_by_field,
    rows_by_client,
)
from fedpax.models.losses import next_word_loss
from fedpax.models.lstm import LSTMConfig, lstm
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.settings.cohort_settings import (
    CohortConfig,
    NaturalPopulation,
    ServerConfig,
    check_has_fields,
)
from fedpax.sources.data_sets import data_folder, unreachable_hosts
from fedpax.sources.federated_archive import ARCHIVES_URL, Archive, check
from fedpax.sources.source import get_field
from fedpax.training.evaluation import Batch
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgTokens(FedAvgExperiment):
    """A recurrent network that predicts the next token, trained on clients' rows of tokens.

    The weight of a client is its number of targets.

    Attributes:
        seq_len: targets of a row.
        model: the network.
    """

    seq_len: int
    model: LSTMConfig

    @property
    @abc.abstractmethod
    def num_known(self) -> int:
        """The metric `accuracy` counts the targets 1 to `num_known`."""

    def make_model(self) -> FunctionalModel:
        """Make the network."""
        return lstm(self.model)

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy; the metric `accuracy` counts a batch."""
        parts = next_word_loss(model.apply, self.num_known)

        def loss_fn(
            params: Params, batch: chex.ArrayTree
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, aux = parts(params, batch)
            return loss, {"accuracy": aux["known_correct"] / jnp.maximum(aux["known"], 1e-9)}

        return loss_fn

    def make_evaluation(
        self, evaluate: Callable[..., Callable[[Params], dict[str, float]]], model: FunctionalModel
    ) -> Callable[[Params], dict[str, float]]:
        """Make the evaluation: the loss and the accuracy of all held-out targets together."""
        return evaluate(next_word_loss(model.apply, self.num_known))

    def finish_metrics(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Divide the known targets that are correct by all known ones."""
        if not {"loss", "known", "known_correct"} <= means.keys():
            return {}
        accuracy = means["known_correct"] / np.maximum(means["known"], 1e-9)
        return {"loss": means["loss"], "accuracy": accuracy}

    @abc.abstractmethod
    def read_heldout_rows(
        self, heldout: Source, preprocess: Preprocess
    ) -> tuple[Batch, NDArray[np.int64]]:
        """Read the rows of the evaluation, and return them and the example of each row."""

    def read_heldout(self, heldout: Source, preprocess: Preprocess) -> Sequence[Batch]:
        """Read the batches of the evaluation; the last one is padded with rows of zeros."""
        return pad_batches(self.read_heldout_rows(heldout, preprocess)[0], self.heldout_batch_size)

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Make the evaluation by client, on its rows of the held-out split."""
        heldout = self.read_heldout_source()
        field = getattr(self.population, "field", "client")
        check_has_fields(heldout, field)
        rows, examples = self.read_heldout_rows(heldout, self.make_preprocess())
        clients = owners_by_field(heldout, field)
        owners = clients.owners[examples]
        parts = partition_natural(owners)

        return masked_loss_by_client(
            next_word_loss(model.apply, self.num_known),
            rows_by_client(rows, parts),
            [clients.names[k] for k in parts.names],
            self.finish_metrics,
        )

    def make_stream(self, rounds: CohortRounds, sampler: ClientSampler) -> CohortStream:
        """Weigh each client by its number of targets."""
        del sampler

        def weigh(cohort: Cohort, round_number: int) -> Cohort:
            del round_number
            targets = cohort.batches["mask"].sum(axis=(1, 2, 3), dtype=np.int32)
            return cohort._replace(num_examples=targets)

        return ScheduledRounds(rounds, weigh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgWords(FedAvgTokens):
    """A recurrent network that predicts the next word, trained on clients' sentences.

    The examples of `dataset` have a field `text`, words separated by spaces. The vocabulary is the
    most frequent words of Stack Overflow.

    Attributes:
        vocab_size: number of words in the vocabulary.
        seq_len: words of a sentence; the rest is cut off.
        heldout_examples: sentences of the held-out split to evaluate on, evenly spaced. Default
            None: all of them.
        model: the network; its `vocab_size` is `vocab_size` and 4 special tokens.
    """

    vocab_size: Count = 10_000
    seq_len: Count = 20
    heldout_examples: Count | None = None
    model: LSTMConfig = dataclasses.field(default_factory=LSTMConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.vocab_size != (size := self.vocab_size + NUM_SPECIAL):
            raise ArgumentError(
                f"model.vocab_size={self.model.vocab_size}, expected vocab_size={self.vocab_size} "
                f"and {NUM_SPECIAL} special tokens. Set --model.vocab_size={size}."
            )

    def read_population(self) -> tuple[Partition, None]:
        """Return the indices of each client's sentences; text has no labels."""
        return self.population.make(self.read_source(), self.cohort.seed), None

    def read_source(self) -> Source:
        """Open the training split, and check its field."""
        source = super().read_source()
        check_has_fields(source, "text")
        return source

    def make_preprocess(self) -> Preprocess:
        """Read the vocabulary, and make the function from sentences to rows."""
        return WordRows(stackoverflow_words(self.vocab_size, data_dir=self.data_dir), self.seq_len)

    def read_heldout_rows(
        self, heldout: Source, preprocess: Preprocess
    ) -> tuple[Batch, NDArray[np.int64]]:
        """Read the sentences of the evaluation, a row each."""
        chosen = evenly_spaced(len(heldout), self.heldout_examples or len(heldout))
        sentences = np.array([heldout[int(index)]["text"] for index in chosen], object)
        return preprocess({"text": sentences}), np.asarray(chosen, np.int64)

    @property
    def num_known(self) -> int:
        """The number of words: accuracy leaves out padding, unknown words, ends of sentences."""
        return self.vocab_size


def pad_batches(rows: Batch, size: int) -> list[Batch]:
    """Split rows into batches of `size` rows; zeros pad the last one."""
    padded = {
        name: np.pad(values, [(0, -len(values) % size), (0, 0)]) for name, values in rows.items()
    }
    return [
        {name: values[first : first + size] for name, values in padded.items()}
        for first in range(0, len(padded["mask"]), size)
    ]


def fedadam_stackoverflow() -> FedAvgWords:
    """FedAdam on Stack Overflow, next-word prediction, 50 of 342,477 users a round. Downloads once.

    The settings of the paper: an LSTM of 4,050,748 parameters, clients weighted by their numbers of
    words.

    Reference:
        Reddi et al., arXiv:2003.00295, section 5 and appendix. Learning rates, tau and weights:
        google-research/federated.
    """
    return FedAvgWords(
        dataset="federated_stackoverflow",
        heldout_examples=10_000,
        heldout_batch_size=100,
        population=NaturalPopulation(field="client", max_examples=1000),
        cohort=CohortConfig(size=50, batch_size=16),
        client_learning_rate=10**-0.5,
        server=ServerConfig(optimizer="adam", learning_rate=10**-2, b1=0.9, tau=1e-5),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def fedyogi_stackoverflow() -> FedAvgWords:
    """FedYogi with the settings of fedadam_stackoverflow, best for both. Downloads once."""
    base = fedadam_stackoverflow()
    return dataclasses.replace(base, server=dataclasses.replace(base.server, optimizer="yogi"))


# ---- sentences as rows of words from a fixed vocabulary, to predict the next word

NUM_SPECIAL = 4
"""Numbers beside the words' numbers: padding, unknown word, begin and end of a sentence."""


class WordRows:
    """A function from sentences to the batches of a language model of words, one row a sentence."""

    # 0 is padding, 1 to V are the vocabulary, V + 1 is a word outside it, V + 2 the begin and V + 3
    # the end of a sentence. Row: begin, up to `seq_len` words, and the end if the sentence is
    # shorter. Reddi et al., arXiv:2003.00295, appendix C, and the authors' code.

    def __init__(self, words: Sequence[bytes], seq_len: int) -> None:
        if seq_len < 1:
            raise ArgumentError(f"seq_len is {seq_len}, expected at least 1.")
        self._numbers = {word: number for number, word in enumerate(words, start=1)}
        if len(self._numbers) < len(words):
            raise ArgumentError(
                f"The {len(words)} words have {len(words) - len(self._numbers)} duplicates, "
                "expected different words: remove the duplicates."
            )
        self._seq_len = seq_len

    def __call__(self, fields: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Encode sentences as `inputs`, `targets` and `mask`, `[examples, seq_len]`."""
        sentences = get_field(fields, "text")
        unknown, begin, end = (len(self._numbers) + k for k in range(1, NUM_SPECIAL))
        rows = np.zeros((len(sentences), self._seq_len + 1), np.int32)
        rows[:, 0] = begin
        for row, sentence in zip(rows, sentences, strict=True):
            if not isinstance(sentence, str | bytes):
                raise ArgumentTypeError(
                    f"A sentence in the field 'text' is {sentence!r:.80}, expected str or bytes. "
                    "Leave out examples without one."
                )
            text = sentence.encode() if isinstance(sentence, str) else sentence
            words = text.split()[: self._seq_len]
            numbers = [self._numbers.get(word, unknown) for word in words]
            if len(numbers) < self._seq_len:
                numbers.append(end)
            row[1 : 1 + len(numbers)] = numbers
        targets = rows[:, 1:]
        return {"inputs": rows[:, :-1], "targets": targets, "mask": targets != 0}


# ---- the words of Stack Overflow by frequency, as TensorFlow Federated publishes them

ARCHIVE = Archive(
    f"{ARCHIVES_URL}/stackoverflow.word_count.tar.bz2",
    sha256="1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
)
_MEMBER = "stackoverflow.word_count"


def stackoverflow_words(
    count: int, *, data_dir: str | os.PathLike[str] | None = None
) -> list[bytes]:
    """Return the most frequent words in the training split of Stack Overflow, in their order."""
    # On a machine without a network, put the archive into `<data_dir>/downloads/manual`. Address,
    # SHA-256 and format are those of TensorFlow Federated, stackoverflow.py.
    if count < 1:
        raise ArgumentError(f"count is {count}, expected at least 1.")
    path = _find(data_folder(data_dir))
    try:
        check(path, ARCHIVE)
        with tarfile.open(path) as archive:
            lines = archive.extractfile(_MEMBER) or ()  # (): a folder
            words = [line.split()[0] for line in itertools.islice(lines, count)]
    except PermissionError:
        raise
    except (OSError, EOFError, KeyError, IndexError, tarfile.TarError) as error:
        raise OSError(
            f"{path} {error}: replace it with a new copy of {ARCHIVE.url}, or delete it and load "
            "again."
        ) from None
    if len(words) < count:
        raise ArgumentError(f"{path} has {len(words)} words, expected {count}: ask for fewer.")
    return words


def _find(root: Path) -> Path:
    """Return the archive's path, after a download if necessary."""
    manual = root / "downloads" / "manual" / ARCHIVE.filename
    if manual.exists():
        return manual
    downloads = tfds.download.DownloadManager(download_dir=root / "downloads")
    if unreachable_hosts([ARCHIVE.url]):
        raise ConnectionError(
            f"The words of Stack Overflow are not in {root} and cannot be downloaded, because "
            f"their host cannot be reached. Put {ARCHIVE.url} into {manual.parent} and load again."
        )
    return Path(downloads.download(ARCHIVE.url))

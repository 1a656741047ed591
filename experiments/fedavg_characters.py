"""FedAvg and FedOpt on texts of characters: next-character prediction by a recurrent network."""

import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from fedpax.checks import Count
from fedpax.data import Partition, Source
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_words import FedAvgTokens
from fedpax.models.lstm import LSTMConfig
from fedpax.settings.cohort_settings import (
    CohortConfig,
    NaturalPopulation,
    ServerConfig,
    check_has_fields,
)
from fedpax.training.evaluation import Batch
from fedpax.training.training_config import TrainingConfig


def _published_model() -> LSTMConfig:
    size = len(SHAKESPEARE_CHARACTERS) + NUM_SPECIAL
    return LSTMConfig(size, embed_dim=8, hidden_dim=256, num_layers=2, has_projections=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgCharacters(FedAvgTokens):
    """A recurrent network that predicts the next character, trained on clients' texts.

    The examples of `dataset` have a field `text`, UTF-8 bytes. The vocabulary is the 86 characters
    of Shakespeare's plays.

    Attributes:
        seq_len: characters of a row.
        model: the network; its `vocab_size` counts the characters and 4 special tokens.
    """

    seq_len: Count = 80
    model: LSTMConfig = dataclasses.field(default_factory=_published_model)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.vocab_size != (size := len(SHAKESPEARE_CHARACTERS) + NUM_SPECIAL):
            raise ArgumentError(
                f"model.vocab_size={self.model.vocab_size}, expected {size}: "
                f"{size - NUM_SPECIAL} characters and {NUM_SPECIAL} special tokens. Set "
                f"--model.vocab_size={size}."
            )

    @property
    def num_known(self) -> int:
        """All numbers but the number of padding."""
        return self.model.vocab_size - 1

    def read_population(self) -> tuple[Partition, None]:
        """Return the indices of each client's rows; text has no labels."""
        return self.read_clients()[1], None

    def read_source(self) -> Source:
        """Open the training split, and check its field."""
        source = super().read_source()
        check_has_fields(source, "text")
        return source

    def read_clients(self) -> tuple[Arrays, Partition]:
        """Return the rows of all texts, and the indices of each client's rows."""
        source = self.read_source()
        rows, counts = self._rows(source)
        starts = np.cumsum(counts) - counts
        population = [
            np.concatenate([starts[i] + np.arange(counts[i]) for i in texts])
            for texts in self.population.make(source, self.cohort.seed)
        ]
        return {"rows": rows}, population

    def make_preprocess(self) -> Preprocess:
        """Make the function from rows to inputs and targets."""
        return character_batch

    def read_heldout_rows(
        self, heldout: Source, preprocess: Preprocess
    ) -> tuple[Batch, NDArray[np.int64]]:
        """Read the rows of the evaluation, and return them and the text of each row."""
        rows, counts = self._rows(heldout)
        return preprocess({"rows": rows}), np.repeat(np.arange(len(counts)), counts)

    def _rows(self, source: Source) -> tuple[Any, Any]:
        return character_rows([source[i]["text"] for i in range(len(source))], self.seq_len)


def fedyogi_shakespeare() -> FedAvgCharacters:
    """FedYogi on Shakespeare's plays, next-character prediction, 10 of 715 roles. Downloads once.

    The settings of the paper: an LSTM of 820,522 parameters, clients weighted by their numbers of
    characters.

    Reference:
        Reddi et al., arXiv:2003.00295, section 5 and appendix. The vocabulary and the rows: the
        authors' code.
    """
    return FedAvgCharacters(
        dataset="federated_shakespeare",
        population=NaturalPopulation(field="client"),
        cohort=CohortConfig(size=10, batch_size=4),
        client_learning_rate=1.0,
        server=ServerConfig(optimizer="yogi", learning_rate=0.01, b1=0.9),
        training=TrainingConfig(rounds=1200, evaluate_every=50, checkpoint_every=100),
    )


# ---- texts as rows of characters from a fixed vocabulary, to predict the next character

SHAKESPEARE_CHARACTERS = bytes(
    sorted((string.ascii_letters + string.digits + "\n\r !\"#$%&'()*,-./:;?@[]_").encode())
)
"""The 86 characters of Shakespeare's plays in the experiments of FedOpt."""

NUM_SPECIAL = 4
"""Numbers beside the characters' numbers: padding, unknown character, begin and end of a text."""


def character_rows(
    texts: Sequence[bytes], seq_len: int, characters: bytes = SHAKESPEARE_CHARACTERS
) -> tuple[UInt8[np.ndarray, "rows seq_len+1"], Int64[np.ndarray, " texts"]]:
    """Encode texts as rows of `seq_len` + 1 numbers; return them, and the rows of each text."""
    # 0 is padding, 1 to V are the characters, V + 1 is any other byte, V + 2 the begin and V + 3
    # the end of a text. A text is split into rows of `seq_len` + 1 numbers: the first one of a row
    # is no target. Reddi et al., arXiv:2003.00295, appendix C, and the authors' code.
    if seq_len < 1:
        raise ArgumentError(f"seq_len is {seq_len}, expected at least 1.")
    size = len(characters)
    if len(set(characters)) < size or size + NUM_SPECIAL > 256:
        raise ArgumentError(
            f"characters has {size} bytes, {len(set(characters))} of them different, expected at "
            f"most {256 - NUM_SPECIAL} different bytes: remove the others."
        )
    numbers = np.full(256, size + 1, np.uint8)
    numbers[list(characters)] = np.arange(1, size + 1)
    length = seq_len + 1
    counts = np.array([-(-(len(text) + 2) // length) for text in texts], np.int64)
    rows = np.zeros(counts.sum() * length, np.uint8)
    for text, start in zip(texts, length * (np.cumsum(counts) - counts), strict=True):
        end = start + 1 + len(text)
        rows[start], rows[end] = size + 2, size + 3
        rows[start + 1 : end] = numbers[np.frombuffer(text, np.uint8)]
    return rows.reshape(-1, length), counts


def character_batch(fields: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Make a language model's batch of `character_rows`: a `preprocess` of `cohort_rounds`."""
    rows = fields["rows"].astype(np.int32)
    targets = rows[:, 1:]
    return {"inputs": rows[:, :-1], "targets": targets, "mask": targets != 0}

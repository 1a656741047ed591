"""Sentences as rows of words from a fixed vocabulary, to predict the next word."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.sources.examples import get_field

NUM_SPECIAL = 4
"""Numbers beside the words' numbers: padding, unknown word, begin and end of a sentence."""


class WordRows:
    """A function from sentences to the batches of a language model of words, one row a sentence."""

    # It is a `preprocess` of `cohort_rounds`. A word is a number: 0 is padding, 1 to V are the
    # vocabulary from its first word on, V + 1 is a word outside it, V + 2 the begin and V + 3 the
    # end of a sentence. Row: begin, up to `seq_len` words, and the end if the sentence is shorter.
    # Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, appendix C; the numbers
    # follow the authors' code, google-research/federated,
    # utils/datasets/stackoverflow_word_prediction.py.

    def __init__(self, words: Sequence[bytes], seq_len: int, *, field: str = "text") -> None:
        if seq_len < 1:
            raise ArgumentError(f"seq_len is {seq_len}, expected at least 1.")
        self._numbers = {word: number for number, word in enumerate(words, start=1)}
        if len(self._numbers) < len(words):
            raise ArgumentError(
                f"The {len(words)} words have {len(words) - len(self._numbers)} duplicates, "
                "expected different words: remove the duplicates."
            )
        self._seq_len, self._field = seq_len, field

    def __call__(self, fields: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Encode sentences as `inputs`, `targets` and `mask`, `[examples, seq_len]`."""
        sentences = get_field(fields, self._field)
        unknown, begin, end = (len(self._numbers) + k for k in range(1, NUM_SPECIAL))
        rows = np.zeros((len(sentences), self._seq_len + 1), np.int32)
        rows[:, 0] = begin
        for row, sentence in zip(rows, sentences, strict=True):
            if not isinstance(sentence, str | bytes):
                raise ArgumentTypeError(
                    f"A sentence in the field {self._field!r} is {sentence!r:.80}, expected str or "
                    "bytes. Leave out examples without one, or name another field."
                )
            text = sentence.encode() if isinstance(sentence, str) else sentence
            words = text.split()[: self._seq_len]
            numbers = [self._numbers.get(word, unknown) for word in words]
            if len(numbers) < self._seq_len:
                numbers.append(end)
            row[1 : 1 + len(numbers)] = numbers
        targets = rows[:, 1:]
        return {"inputs": rows[:, :-1], "targets": targets, "mask": targets != 0}

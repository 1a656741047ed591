"""Text of clients as rows of tokens, the examples of `cohort_rounds`."""

import numpy as np
from numpy.typing import NDArray

from fedpax.data.rounds.documents import Field, encode_named
from fedpax.data.rounds.labeled_examples import Arrays
from fedpax.errors import ArgumentError
from fedpax.sources.source import Examples, as_examples, get_field
from fedpax.text.packing import (
    AnyDocument,
    Batch,
    TokenPairs,
    concatenate,
    keep_in_rows,
    split_rows,
    to_batch,
)
from fedpax.text.tokenizer import BYTE_TOKENIZER, Tokenizer


def pack_clients(
    source: Examples,
    *,
    seq_len: int,
    field: Field = "text",
    client_field: str | None = "client",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> tuple[Arrays, list[NDArray[np.int64]]]:
    """Pack the documents of each client into rows `[rows, seq_len]`, for `cohort_rounds`."""
    # No row has tokens of two clients. Clients are in the order of their names; without
    # `client_field` there is one.
    source = as_examples(source)
    if not len(source):
        raise ArgumentError("The source has no examples to train on: load another split.")
    documents: dict[str | bytes, list[AnyDocument]] = {}
    for i in range(len(source)):
        example = source[i]
        tokens = encode_named(tokenizer, source, [i], [example], field)[0]
        name = "" if client_field is None else get_field(example, client_field)
        documents.setdefault(name, []).append(tokens)
    separator = tokenizer.separator
    packed = [
        split_rows(
            concatenate(keep_in_rows(documents[name], seq_len, separator), separator), seq_len
        )
        for name in sorted(documents)
    ]
    ends = np.cumsum([len(valid) for _, valid in packed])
    rows = {
        name: np.concatenate([getattr(pairs, name) for pairs, _ in packed])
        for name in TokenPairs._fields
    }
    rows["valid"] = np.concatenate([valid for _, valid in packed])
    population = [
        np.arange(end - len(valid), end) for (_, valid), end in zip(packed, ends, strict=True)
    ]
    return rows, population


def preprocess_rows(fields: Arrays) -> Batch:
    """Make a language model's batch, as `fedpax.data.pack` does, of rows from `pack_clients`."""
    return to_batch(TokenPairs(*(fields[name] for name in TokenPairs._fields)), fields["valid"])

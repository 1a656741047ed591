"""Held-out text: a fixed, finite list of batches to evaluate on."""

import numpy as np

from fedpax.data.populations.partition import Examples, get_field
from fedpax.data.rounds.stream import check_sizes
from fedpax.data.text.packing import Batch, concatenate, split_rows, to_batch
from fedpax.data.text.tokenizer import BYTE_TOKENIZER, Tokenizer


def heldout_batches(
    source: Examples,
    *,
    batch: int,
    length: int,
    max_tokens: int | None = None,
    field: str = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> list[Batch]:
    """Packs a split into batches, in the source's order.

    Every batch has the same shape, so that one compiled function evaluates all of them: the last
    one is filled up with rows of padding, where the mask is 0. A mean over the split must
    therefore weigh each batch by the sum of its mask.

    Args:
        source: the documents; a source that ``load`` returned, or a list of dicts.
        batch: rows in a batch.
        length: tokens in a row.
        max_tokens: take only as many rows as hold this many tokens, evenly spaced over the
            split, so that one long document does not stand for all. By default all rows.
        field: the field of an example that holds its text, bytes of UTF-8 or a string.
        tokenizer: what turns texts into tokens.

    Returns:
        Dicts of arrays [batch, length] as ``fedpax.data.pack`` describes them: ``inputs``,
        ``targets``, ``segments``, ``positions`` (int32) and ``mask`` (float32).

    Raises:
        ValueError: for sizes that are not positive, a source without examples, or ``max_tokens``
            below ``length``.

    Example:
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> batches = heldout_batches(source, batch=2, length=8)
        >>> len(batches), batches[0]["inputs"].shape
        (2, (2, 8))
        >>> int(sum(batch["mask"].sum() for batch in batches))  # 5 + 1 + 12 + 1 targets
        19
    """
    check_sizes(1, batch=batch, length=length)
    if not len(source):
        raise ValueError("The source has no examples to evaluate on: load another split.")
    if max_tokens is not None and max_tokens < length:
        raise ValueError(
            f"max_tokens is {max_tokens}, less than one row of length={length}: give at least "
            "that, or None for the whole split."
        )
    documents = (tokenizer.encode(get_field(source[i], field)) for i in range(len(source)))
    rows, present = split_rows(concatenate(documents, tokenizer.separator), length)
    if max_tokens is not None and max_tokens < present.size:
        chosen = np.linspace(0, len(present) - 1, max_tokens // length).round().astype(np.int64)
        rows, present = rows.take(chosen), present[chosen]
    padding = ((0, -len(present) % batch), (0, 0))
    whole = to_batch(rows.map(lambda array: np.pad(array, padding)), np.pad(present, padding))
    return [
        {name: array[start : start + batch] for name, array in whole.items()}
        for start in range(0, len(whole["mask"]), batch)
    ]

"""heldout_token_batches: a finite list of packed batches of text to evaluate on.

For labeled images see `fedpax.data.read_examples` and `fedpax.data.example_batches`.
"""

import numpy as np

from fedpax.data.populations.partition import Examples, get_field
from fedpax.data.rounds.stream import check_sizes
from fedpax.data.text.packing import Batch, concatenate, split_rows, to_batch
from fedpax.data.text.tokenizer import BYTE_TOKENIZER, Tokenizer


def heldout_token_batches(
    source: Examples,
    *,
    batch_size: int,
    seq_len: int,
    max_tokens: int | None = None,
    field: str = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> list[Batch]:
    """Pack a split of text into batches, in the source's order.

    All batches have the same shape, so one compiled function evaluates them. The last batch is
    completed with rows of padding, whose mask is 0: to average over the split, weight each batch by
    the sum of its mask.

    Args:
        source: the documents: a source from `load`, or a list of dicts.
        batch_size: rows per batch.
        seq_len: tokens per row.
        max_tokens: use only this many tokens, in rows evenly spaced over the split, so that they
            come from many documents. Default None: use all rows.
        field: the field of an example with its text, a string or UTF-8 bytes.
        tokenizer: the tokenizer.

    Returns:
        Dicts of arrays `[batch_size, seq_len]`, as `fedpax.data.pack` returns them: `inputs`,
        `targets`, `segments`, `positions` (int32) and `mask` (float32).

    Raises:
        ValueError: a size is below 1, the source has no examples, or `max_tokens` is below
            `seq_len`.

    Example:
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> batches = heldout_token_batches(source, batch_size=2, seq_len=8)
        >>> len(batches), batches[0]["inputs"].shape
        (2, (2, 8))
        >>> int(sum(batch["mask"].sum() for batch in batches))  # 5 + 1 + 12 + 1 targets
        19
    """
    check_sizes(1, batch_size=batch_size, seq_len=seq_len)
    if not len(source):
        raise ValueError("The source has no examples to evaluate on: load another split.")
    if max_tokens is not None and max_tokens < seq_len:
        raise ValueError(
            f"max_tokens is {max_tokens}, expected at least one row of seq_len={seq_len}, or None "
            "for the whole split."
        )
    documents = (tokenizer.encode(get_field(source[i], field)) for i in range(len(source)))
    rows, valid = split_rows(concatenate(documents, tokenizer.separator), seq_len)
    if max_tokens is not None and max_tokens < valid.size:
        chosen = np.linspace(0, len(valid) - 1, max_tokens // seq_len).round().astype(np.int64)
        rows, valid = rows.take(chosen), valid[chosen]
    padding = ((0, -len(valid) % batch_size), (0, 0))
    padded = to_batch(rows.map(lambda array: np.pad(array, padding)), np.pad(valid, padding))
    return [
        {name: array[start : start + batch_size] for name, array in padded.items()}
        for start in range(0, len(padded["mask"]), batch_size)
    ]

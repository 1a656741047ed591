"""Documents: the tokens of examples, by the field of their text or of their conversation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedpax.errors import ArgumentError, FedpaxError
from fedpax.files import BYTE_ORDER_MARK
from fedpax.sources.source import Examples, get_field
from fedpax.text.conversation import Conversation
from fedpax.text.packing import AnyDocument, Tokens
from fedpax.text.tokenizer import Tokenizer

Field: TypeAlias = str | Conversation
"""The field of an example that has its text or tokens, or the fields of a conversation."""


def encode_examples(
    tokenizer: Tokenizer, examples: Sequence[Mapping[str, Any]], field: Field
) -> Sequence[AnyDocument]:
    """Tokenize examples."""
    if isinstance(field, Conversation):
        return field.encode(examples, tokenizer)
    return encode_documents(tokenizer, [get_text(example, field) for example in examples])


def encode_named(
    tokenizer: Tokenizer,
    source: Examples,
    numbers: Sequence[int],
    examples: Sequence[Mapping[str, Any]],
    field: Field,
) -> Sequence[AnyDocument]:
    """Tokenize examples of a source; an error names the example by its file or number."""
    try:
        return encode_examples(tokenizer, examples, field)
    except FedpaxError:
        for number, example in zip(numbers, examples, strict=True):
            try:
                encode_examples(tokenizer, [example], field)
            except FedpaxError as error:
                locate = getattr(source, "locate", None)
                name = getattr(source, "name", type(source).__name__)
                where = locate(number) if locate else f"{number} of {name}"
                raise type(error)(f"Example {where}, counted from 0: {error}") from error
        raise


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Any]) -> list[Tokens]:
    """Tokenize documents; those that are integers are tokens already."""
    if not all(_are_tokens(document) for document in documents):
        return tokenizer.encode_all(documents)
    parts = []
    for document in documents:
        if document.size and not 0 <= document.min() <= document.max() < tokenizer.vocab_size:
            raise ArgumentError(
                f"A document has the tokens {document.min()} to {document.max()}, expected 0 to "
                f"{tokenizer.vocab_size - 1}. Set the tokenizer that made them."
            )
        # Packing adds the separators.
        end = len(document) - (document[-1:] == tokenizer.separator).any()
        parts.append(np.asarray(document[: int(end)]))
    return parts


def _are_tokens(document: Any) -> bool:
    return isinstance(document, np.ndarray) and document.ndim == 1 and document.dtype.kind in "iu"


def get_text(example: Mapping[str, Any], field: str) -> Any:
    """Return the field of an example that holds its text, without a byte-order mark."""
    text = get_field(example, field)
    if isinstance(text, bytes):
        return text.removeprefix(BYTE_ORDER_MARK)
    return text.removeprefix(BYTE_ORDER_MARK.decode()) if isinstance(text, str) else text


def read(source: Examples, indices: Sequence[int]) -> Sequence[Any]:
    """Read examples, in one call if the source has `__getitems__`."""
    # Sources of array_record files have it, and read in parallel.
    together: Callable[[Sequence[int]], Sequence[Any]] | None
    together = getattr(source, "__getitems__", None)
    return [source[index] for index in indices] if together is None else together(indices)

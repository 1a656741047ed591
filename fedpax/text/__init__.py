"""Text: tokenizers (bytes, or a `tokenizer.json`) and packing of documents into rows."""

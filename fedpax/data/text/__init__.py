"""Text: tokenizers and packing."""

"""Rounds: endless streams, one cohort per round, whose position can be saved and restored.

- `cohort_rounds`: sampled clients of a population, each with its own number of examples.
- `example_rounds`: labeled images for a fixed set of clients, the same number for each.
- `token_rounds`: packed text for language models, one shard per island.
- `heldout_token_batches` (text), `read_examples` and `example_batches` (labeled images): finite
  data for evaluation.

Every item is a `fedpax.Cohort` of NumPy arrays. `get_state` returns a stream's position as JSON
values and `set_state` restores it, so that a resumed run sees the batches of an uninterrupted one.
"""

"""Sources: data sets by name as sequences of examples, read without TensorFlow.

`data_sets` opens TFDS data sets, the two embedded ones (`stdlib_text` and `digits`), the federated
ones, and texts in array_record files. `as_examples` reads what a user has in memory. Users call
`fedpax.data.load`.
"""

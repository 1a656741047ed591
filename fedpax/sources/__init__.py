"""Sources: data sets by name as sequences of examples, read without TensorFlow.

`data_sets` opens any TFDS data set, the two embedded ones (`stdlib_text` and `digits`, made from
files that every machine has), the federated ones (EMNIST, Shakespeare, Stack Overflow and CIFAR-100
by client), and texts in array_record files by their path. `as_examples` reads what a user has in
memory. Users call `fedpax.data.load`.
"""

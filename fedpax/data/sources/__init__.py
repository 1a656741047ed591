"""Sources: data sets by name, prepared through TFDS and read without TensorFlow.

`load(name, split)` opens any TFDS data set, the two embedded ones (`stdlib_text` and `digits`, made
from files that every machine has), the federated ones (EMNIST, Shakespeare, Stack Overflow and
CIFAR-100 by client), and texts in array_record files by their path.
"""

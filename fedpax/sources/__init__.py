"""Sources: data sets by name as sequences of examples, read without TensorFlow."""

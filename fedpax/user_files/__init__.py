"""Users' own files as clients: parsed by kept libraries into Arrow tables, and read as sources.

`open_files` finds the files, reads them as one `pyarrow.Table`, adds the client that a path names,
sorts by client (stable: a client's examples keep their order) and returns a `TableSource`.

- `TableSource.table` is the Arrow table: types, categories and nulls as the files have them.
- `TableSource.column(name)` is one column in NumPy. A column with missing values is a
  `numpy.ma.MaskedArray`, whose `mask` is True where a value is missing; a column without missing
  values is a plain array. NaN in a file of floats is a number, not a missing value. Texts are
  objects of `str`, dates `datetime64`, tensors `[examples, ...]`.
- `TableSource.take(indices)` has the same arrays for some examples, by column.
- `source[i]` is a dict with the same values, in which None is missing.
- `TableSource.client_starts` and `client_names` index the clients.

Needs the packages of the extra `files`: `pip install "fedpax[files]"`.
"""

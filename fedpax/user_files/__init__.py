"""Users' own files as clients: parsed by libraries into Arrow tables, and read as sources.

A column in NumPy is a `numpy.ma.MaskedArray` where values are missing, otherwise a plain array. NaN
in a file of floats is a number, not a missing value.
"""

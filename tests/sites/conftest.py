"""Makes the modules of this folder importable in the tests of the folders below it."""

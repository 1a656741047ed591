"""Makes the modules of this folder importable in its tests."""

"""The former place of classes that `config.json` of older runs names."""

from fedpax.experiments.client_methods import __getattr__ as __getattr__

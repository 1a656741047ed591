"""The former place of classes that `config.json` of older runs names."""

from fedpax.experiments.client_aggregators import __getattr__ as __getattr__

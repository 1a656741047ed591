"""The public names of apps of Flower, for type checkers and `fedpax.lazy_names`."""

from fedpax.deploy.flower.app import client_app as client_app
from fedpax.deploy.flower.app import server_app as server_app

"""Flower as the carrier of rounds on nodes: its apps, its processes and SecAgg+."""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.deploy.flower.app import client_app as client_app
    from fedpax.deploy.flower.app import server_app as server_app

_NAMES = {
    "fedpax.deploy.flower.app": "client_app server_app",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)

"""Clients: the cohort of a round, and the state that clients keep between rounds."""

from fedpax.clients.arrival_schedules import ArrivalOrder, Arrivals, RegionalOrder, Syncs
from fedpax.clients.cohort import Cohort, IdentifiedStream, check_cohort
from fedpax.clients.row_blocks import home_devices
from fedpax.clients.store import ClientStore, client_store, gather_clients, scatter_clients

__all__ = [
    "ArrivalOrder",
    "Arrivals",
    "ClientStore",
    "Cohort",
    "IdentifiedStream",
    "RegionalOrder",
    "Syncs",
    "check_cohort",
    "client_store",
    "gather_clients",
    "home_devices",
    "scatter_clients",
]

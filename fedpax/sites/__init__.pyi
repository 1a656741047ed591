"""The public names of rounds over sites, for type checkers and `fedpax.lazy_names`."""

from fedpax.sites.site_process import JoinResult as JoinResult
from fedpax.sites.site_process import SyncerResult as SyncerResult
from fedpax.sites.update_filters import AcceptIf as AcceptIf
from fedpax.sites.update_filters import NormHistory as NormHistory
from fedpax.sites.update_filters import drop_harmful as drop_harmful
from fedpax.sites.update_filters import drop_large as drop_large
from fedpax.sites.update_filters import parse_accept_if as parse_accept_if

def __getattr__(name: str) -> object: ...

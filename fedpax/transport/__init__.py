"""Calls between processes of different owners, over gRPC.

- `calls`, `message`: a server, its clients, and messages.
- `authority`, `certificates`, `signed_keys`: who a site is.
- `admission`, `call_limits`: what a server accepts from strangers.

Its modules need the extra `sites`.
"""

__all__: list[str] = []

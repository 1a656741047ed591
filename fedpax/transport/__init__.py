"""Calls between processes of different owners, over gRPC.

Its modules need the extra `sites`.
"""

__all__: list[str] = []

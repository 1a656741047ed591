"""Aggregators: the path of an update from the participants to the server."""

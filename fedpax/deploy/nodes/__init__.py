"""Rounds on nodes with their own data: a server and participants that exchange packets."""

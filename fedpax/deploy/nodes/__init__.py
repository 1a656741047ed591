"""Rounds on nodes with data of their own: a server and participants that exchange packets."""

"""Clients: cohorts, and the state that clients keep between rounds."""

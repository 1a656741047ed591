"""Populations: partitions of a data set among clients, and sampling of cohorts."""

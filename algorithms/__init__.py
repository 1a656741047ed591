"""Federated and multi-island methods, one file each, named as their papers name them."""

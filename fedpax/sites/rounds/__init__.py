"""Synchronous rounds over sites that train on data of their own.

- `contract`: what an experiment offers to run over sites.
- `run_coordinator`: the process that holds the model and asks the sites (`fedpax syncer`).
- `take_part`: the process of a site (`fedpax join`).

`fedpax.stages` divides a round into parts: a site runs the clients' part for each of its
clients, merges their terms, and sends the merged terms alone. A site of one client sends encoded
words instead if they are fewer bytes.
"""

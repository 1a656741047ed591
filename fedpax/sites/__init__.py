"""Islands with runtimes of their own, which a syncer merges.

- `syncer`: the process that holds the outer model (`fedpax.sites.syncer.run_syncer`).
- `island`: the processes that train (`fedpax.sites.island.join`).
- `transport`: the messages between them, and certificates.

Beside them: what both sides share, the format of a fragment and the identity of a run.
"""

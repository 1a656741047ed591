"""Populations: the examples of each client, and the clients of each round.

- Partitions divide the examples of a source among participants: at random (`partition_iid`), by a
  field (`partition_by_field`, `partition_natural`), with label skew (`partition_dirichlet`,
  `partition_pachinko`, `partition_by_shards`) or with quantity skew (`partition_by_quantity`).
  `partition_statistics` measures a partition and `plot_partition` draws it.
- `concatenate_clients` makes examples and a population of a list of clients' arrays.
- `DirichletClients` generates a population of any size over a pool of examples.
- `ClientSampler` samples the cohort of a round.
- `balanced_order` orders a cohort's clients on the devices.
"""

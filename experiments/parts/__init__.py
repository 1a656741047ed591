"""Parts that experiments share: held-out data, evaluation by client, weights, sites."""

"""Parts that methods share: local steps, servers, fragments, weights, checks."""

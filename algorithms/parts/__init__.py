"""What methods are made of: local steps, servers, fragments, weights, checks."""

"""Reports on runs: tables, pictures, targets and comparisons."""

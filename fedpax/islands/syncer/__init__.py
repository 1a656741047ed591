"""The syncer: holds the outer model, merges the islands' updates, and saves each merge."""

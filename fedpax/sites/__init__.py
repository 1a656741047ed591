"""Islands with runtimes of their own: a syncer holds the outer model, islands join it."""

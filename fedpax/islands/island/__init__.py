"""An island: joins a syncer, trains on its own devices, and exchanges fragments with it."""

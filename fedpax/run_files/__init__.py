"""The files of a run's folder: config.json, metrics.jsonl, goodput.json."""

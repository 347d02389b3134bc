"""The run folder: metrics log, checkpoints, resume, lock, identity. Importing it loads no torch."""

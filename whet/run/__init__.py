"""The run of a training: the order of its data, resuming, logs, evaluation, checkpoints, and its observers."""

"""The base of all trainers: callbacks, state, logs, files, the model."""

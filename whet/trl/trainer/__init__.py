"""What every trainer of the front has of transformers' Trainer: callbacks, state, logs, files, the model it is given."""

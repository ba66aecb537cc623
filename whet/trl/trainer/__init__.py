"""What every trainer has of transformers' Trainer: callbacks, state, logs, files, the model it is given."""

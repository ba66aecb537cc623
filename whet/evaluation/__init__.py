"""Evaluation of a model on a data set: what `whet eval` measures, and what a run's own evaluation shares with it."""

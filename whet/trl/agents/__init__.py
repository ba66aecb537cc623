"""Agents of GRPOTrainer: tools, environments, a rollout_func, each in place of a single turn of the model."""

"""What plays in place of one turn of the model: tools, environments, a rollout_func."""

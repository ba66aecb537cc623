"""Models: loading, attention over packed rows, heads, log-probabilities."""

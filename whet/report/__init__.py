"""The report of a run: one page, opened from disk, drawn from the run folder alone."""

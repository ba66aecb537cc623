"""From data sets to prompts: rows, their encoding, their order; and the packing of token batches."""

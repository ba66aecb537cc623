"""What whet has because Tunix has it: padded arrays, verbs and records, and the table of its fields."""

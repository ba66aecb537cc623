"""What whet has because Tunix has it: padded arrays, methods and records, and the table of its fields."""

"""Programs for those who work on whet; the package does not contain them."""

"""Storage: files that are written whole or not at all, run folders, checkpoints and their formats, locks, checksums."""

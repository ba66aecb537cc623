"""Reads data sets, encodes their rows, and orders them for a run."""

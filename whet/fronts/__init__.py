"""Shared by the fronts, which take programs written for another library: tables of fields, commands, messages."""

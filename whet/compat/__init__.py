"""Shared by the compatibility layers, which run programs of another library: tables of fields, commands, messages."""

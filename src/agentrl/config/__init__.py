"""Flags of a run: their dataclasses, parsing, checks and description; imports nothing heavy."""

"""Commands of one machine."""

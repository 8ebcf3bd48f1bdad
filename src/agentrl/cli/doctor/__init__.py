"""Check a machine and the services of a run: one file per kind of check."""

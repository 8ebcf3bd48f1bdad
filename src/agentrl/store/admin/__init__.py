"""Maintenance of a run's database: check, prune, rescore, reopen, export, import, users."""

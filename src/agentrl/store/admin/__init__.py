"""Maintenance of a run's database: check, migrate, prune, rescore, reopen, export, import, users."""

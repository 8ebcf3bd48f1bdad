"""Maintenance of one run's database: check, migrate, prune, rescore, reopen, copy, users."""

"""The database: the only package that imports pymongo."""

"""Read and write a run's MongoDB database. The only package that imports pymongo."""

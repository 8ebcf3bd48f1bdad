"""Read and write a run's MongoDB database. The only room of the core that imports pymongo."""

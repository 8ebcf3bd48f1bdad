"""Inference engines: the commands that start their servers, the server processes, and their clients."""

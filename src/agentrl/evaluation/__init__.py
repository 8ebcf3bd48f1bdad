"""Evaluate policies: versions of a run, checkpoints and model folders."""

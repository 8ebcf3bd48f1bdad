"""Holds the trainer's step against the plain model, run over each model call by itself."""

"""Attention over a TokenForest: hidden states that are the same whatever executor runs the model."""

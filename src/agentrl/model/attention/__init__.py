"""Run a model over a TokenForest; every executor returns the same hidden states."""

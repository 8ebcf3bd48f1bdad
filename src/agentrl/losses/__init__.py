"""Losses of the policy on flat per-token tensors; knows no models, forests or databases."""

"""Policy losses on flat per-token tensors; knows nothing of models, forests or databases."""

"""The policy as a torch module: loading, LoRA, logprobs, attention over a TokenForest."""

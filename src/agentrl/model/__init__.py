"""The policy as a torch module: loading, LoRA, attention over a TokenForest, logprobs."""

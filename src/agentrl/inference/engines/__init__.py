"""The engines that ``agentrl serve`` can run: SGLang, vLLM, and a local one on transformers."""

"""The local engine: a small inference server on transformers, for machines without SGLang or vLLM."""

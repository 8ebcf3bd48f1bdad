"""Inference: the engine client, the router over live engines, and the engines."""

"""Translate between the APIs of model providers and the gateway's requests and answers."""

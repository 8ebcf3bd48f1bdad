"""The demonstration: its models, tasks, fine-tuning conversations and tool servers.

``python -m agentrl.base.installation demo/tiny.py …`` runs one of these programs, from a clone or a wheel.
"""

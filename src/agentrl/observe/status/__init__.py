"""The screens of ``agentrl status``."""

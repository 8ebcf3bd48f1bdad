"""AgentRL: reinforcement learning for language-model agents, decoupled over MongoDB."""

__version__ = "0.1.0"

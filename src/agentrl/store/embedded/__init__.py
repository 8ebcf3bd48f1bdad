"""The embedded MongoDB of one machine: a real mongod that AgentRL starts and stops."""

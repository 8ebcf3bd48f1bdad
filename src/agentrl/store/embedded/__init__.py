"""The MongoDB of one machine: a real mongod, started and stopped by AgentRL."""

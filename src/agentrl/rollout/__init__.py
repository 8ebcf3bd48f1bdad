"""Task → Record: claims, conversations, agents, scoring and finished groups."""

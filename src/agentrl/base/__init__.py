"""What knows nothing of AgentRL but its errors: processes, folders, settings, HTTP, registries, spans."""

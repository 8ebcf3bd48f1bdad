"""Wing: tasks of others and where they run: task formats, environments, Harbor, containers, harnesses."""

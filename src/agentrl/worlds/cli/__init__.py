"""Commands that serve tools to others."""

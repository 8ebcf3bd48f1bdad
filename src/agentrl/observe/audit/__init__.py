"""The pages of ``agentrl audit``: each formats what ``store.views`` reads."""

"""Call LLMs other than the policy: judges and the browse agent, behind OpenAI-compatible endpoints."""

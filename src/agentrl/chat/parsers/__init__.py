"""Parse reasoning and tool calls in a model's text: by formats, chosen by ``--tool_call_parser``."""

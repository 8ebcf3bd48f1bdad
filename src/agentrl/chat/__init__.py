"""Messages to token ids and back: renderers, the conversation as ids, parsers of tool calls."""

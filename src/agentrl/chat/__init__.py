"""Messages ⇄ token ids: chat templates, conversations as token ids, tool-call parsers."""

"""Chat formats: messages to segments, and output back to items."""

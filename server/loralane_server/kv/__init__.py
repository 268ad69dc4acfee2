"""KV pages: who owns them, and what those that are kept hold."""

"""All adapters that a shard knows, and the reads under way."""

"""Shards: where they are, which one a request goes to, and what happens when one goes away."""

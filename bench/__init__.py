"""Benchmarks: a load generator for any OpenAI-compatible server, and what it is pointed at."""

"""The wire contract between router, shard and gRPC clients, and the code generated from it."""

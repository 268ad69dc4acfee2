"""One model shard: one base model, one device, many adapters."""

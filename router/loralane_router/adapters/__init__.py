"""What users call adapters, and what is known of them on each shard."""

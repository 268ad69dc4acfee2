"""Several adapters as one."""

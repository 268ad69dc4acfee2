"""The router: requests in, batches out."""

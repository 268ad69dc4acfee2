"""Where adapters come from: references, folders, the hub, S3; files fetched and verified."""

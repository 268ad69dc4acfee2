"""What an adapter's files say: config, headers, names; and how that maps to the base."""

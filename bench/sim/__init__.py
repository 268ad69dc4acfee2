"""A simulator of many shards behind one router: the product's policy code against other rules."""

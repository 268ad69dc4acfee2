"""The device seam and its backends."""

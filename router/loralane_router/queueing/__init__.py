"""Who waits, who goes next, and who is refused."""

"""One config-driven decoder for every supported architecture."""

"""Which rows compute what in the next step."""

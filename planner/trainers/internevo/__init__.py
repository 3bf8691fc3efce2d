"""InternEvo."""

"""Hardware profiles: what one says, where two differ."""

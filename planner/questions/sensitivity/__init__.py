"""The measured numbers that a choice depends on."""

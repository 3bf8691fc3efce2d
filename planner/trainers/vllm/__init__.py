"""vLLM (serves, does not train)."""

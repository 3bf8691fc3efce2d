"""SGLang (serves, does not train)."""

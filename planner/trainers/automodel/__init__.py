"""NeMo AutoModel."""

"""NeMo AutoModel."""

PLACE = 6
FORM = ("yaml yml", r"(?m)_target_:\s*[\"']?nemo_automodel\.|^step_scheduler:")

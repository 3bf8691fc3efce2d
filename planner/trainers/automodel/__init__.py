"""NeMo AutoModel."""

PLACE = 107
FORM = ("yaml yml", r"(?m)_target_:\s*[\"']?nemo_automodel\.|^step_scheduler:")

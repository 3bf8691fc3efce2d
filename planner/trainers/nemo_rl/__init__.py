"""NeMo-RL."""

PLACE = 109
FORM = ("yaml yml", r"^policy:")

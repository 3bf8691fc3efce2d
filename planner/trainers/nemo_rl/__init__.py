"""NeMo-RL."""

PLACE = 5
FORM = ("yaml yml", r"^policy:|^defaults:\s*[\"']?[./\w-]+\.ya?ml")

"""NeMo-RL."""

PLACE = 109
READ_FIRST = True
FORM = ("yaml yml", r"^policy:|^defaults:\s*[\"']?[./\w-]+\.ya?ml")

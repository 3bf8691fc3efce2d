"""LitGPT."""

PLACE = 108
FORM = ("yaml yml", r"(?s)\A(?=.*^(checkpoint_dir|model_name):)(?=.*^train:)(?=.*^precision:)")

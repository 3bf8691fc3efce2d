"""TRL."""

PLACE = 105
FORM = ("yaml yml", r"^(model_name_or_path|per_device_train_batch_size)\s*:")

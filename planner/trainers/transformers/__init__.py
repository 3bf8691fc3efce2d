"""Hugging Face transformers: what the trainers around its Trainer share, and the log that it leaves."""

PLACE = 150
FORM = (
    "json yaml yml sh bash slurm sbatch txt",
    r"per_device_train_batch_size|--(base_model|lora_r|cutoff_len)\b|\btorchrun\b|\baccelerate\s+launch\b|\bdeepspeed\s+\S|\btorch\.distributed\.(run|launch)\b",
)

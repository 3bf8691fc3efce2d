"""nanotron."""

PLACE = 60
TITLE = "nanotron (YAML)"
TRAINERS = ("nanotron",)
PACKAGE, VERSIONS = "nanotron", ">=0.4,<0.5"
LEVEL = "validated"
SOURCE = "huggingface/nanotron 2411b02: config/config.py, config/parallelism_config.py, config/models_config.py"
WRITES = r"(?s:^(?:from|import) nanotron\b.*\bParallelismArgs\()"
"""A program that builds the degrees of a configuration."""
FORM = (
    "yaml yml py sh bash slurm sbatch",
    r"\A(?=(?s:.*^parallelism:))(?=(?s:.*^tokens:))|^[^#\n]*train\w*\.py[\"']?[\s\\](?:[^#;&|\n]|\\\n)*--config-file\b"
    rf"|{WRITES}",
)

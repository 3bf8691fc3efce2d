"""torchtitan."""

PLACE = 30
TITLE = "torchtitan (Python configuration and command line)"
TRAINERS = ("torchtitan",)
OPTIONS = ("loss",)
PACKAGE, VERSIONS = "torchtitan", ">=0.3,<0.4"
LEVEL = "model built"
SOURCE = (
    "torchtitan 0.3.0: config/configs.py, trainer.py, distributed/parallel_dims.py, distributed/pipeline_parallel.py"
)
FORM = (
    "py toml json any",
    r"(?<!parallelism_config import )(?<!accelerate import )(?<!=)ParallelismConfig"  # those are of accelerate
    r"|\[parallelism\]|--parallelism\.|--job\.config_file|torchtitan[./]train(er)?\b|data_parallel_(shard_)?degree"
    r"|(?s:\b(CONFIG_FILE=[^\n]{0,300}\.toml|MODULE=[\"']?([\w.]{1,60}\.)?(llama[34]|deepseek_v3|qwen3|gpt_oss|kimi_k2"
    r"|muse_glimmer|transformers_mod)).{0,4000}\brun_(llama_)?train\.sh\b)",
)
NO_WORD = ("fp8_row",)

"""vLLM (serves, does not train)."""

PLACE = 130
TITLE = "vLLM (serves the plan's model: command line)"
TRAINERS = None
PACKAGE, VERSIONS = "vllm", ">=0.33,<0.34"
LEVEL = "name known"
SOURCE = "vllm 0.33.0: vllm/config/parallel.py, vllm/config/model.py, vllm/engine/arg_utils.py"

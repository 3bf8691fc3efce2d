"""SGLang (serves, does not train)."""

PLACE = 140
TITLE = "SGLang (serves the plan's model: command line)"
TRAINERS = None
PACKAGE, VERSIONS = "sglang", ">=0.5.23,<0.6"
LEVEL = "name known"
SOURCE = "sglang 0.5.23: srt/arg_groups/fields/parallel.py, parallel_hook.py, validation_hook.py"

"""Colossal-AI."""

PLACE = 80
TITLE = "Colossal-AI (plugin arguments and a script)"
TRAINERS = ("colossalai",)
PACKAGE, VERSIONS = "colossalai", ">=0.5,<0.6"
LEVEL = "name known"
SOURCE = "colossalai 0.5.0: booster/plugin/hybrid_parallel_plugin.py, pipeline/stage_manager.py, shardformer/policies"

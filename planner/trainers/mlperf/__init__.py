"""NVIDIA's submissions to MLPerf Training of language models: config_*.sh of environment variables, run by NeMo."""

PLACE = 7
FORM = ("sh", r"(?m)^[ \t]*+(export\s+)?(DGXNNODES|MLPERF_SUBMISSION_ORG)=")

"""Primus of AMD: configurations of Megatron-LM and torchtitan in one form."""

PLACE = 8
FORM = ("yaml yml", r"(?s)^modules:.*^\s+framework:.*^\s+overrides:")

"""MaxText."""

PLACE = 120
TITLE = "MaxText (YAML over base.yml)"
TRAINERS = ("maxtext",)
PACKAGE, VERSIONS = "maxtext", ">=0.2.5,<0.3"
LEVEL = "groups built"
SOURCE = "maxtext 0.2.5: configs/base.yml, configs/types.py, layers/nnx_decoders.py, utils/maxtext_utils.py"

"""torchtune."""

PLACE = 106
FORM = ("yaml yml", r"_component_:\s*[\"']?torchtune\.models\.")

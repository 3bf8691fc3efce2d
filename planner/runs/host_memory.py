"""What a row says about host memory, in any case and spelling."""

from planner.runs.rows import Row

SAID = {
    "offload_optimizer": r"CPU AdamW offload|optimizer offload Y|with optimizer offload|"
                         r"optimizer state offload to CPU, fraction (?P<percent>\d+) %",
    "offload_parameters": r"full CPU offload|offload_params|param(eter)?s? offload(ing)? ?(Y|yes|on|true)\b|ZeRO-?3 (CPU )?offload",
    "offload_activations": r"(activation|checkpoint)s?[a-z ]{0,12} offload(ed|ing)?(?! (N|no|off|false)\b)|"
                           r"checkpoints? ?-?in-? ?(cpu|host)",
    "offload_layers": r"activation offload(?:ing)? (?:of )?(?P<layers>\d+) layers",
}  # fmt: skip
"""By field of a layout: what notes and framework say."""


def offload_of(row: Row) -> dict[str, int]:
    """What is on the host: percent of the optimizer states, weights with all states, activations, of how many layers."""
    found = {name: row.note(text) for name, text in SAID.items()}
    values = {name: 1 for name, match in found.items() if match}
    if optimizer := found["offload_optimizer"]:
        values["offload_optimizer"] = min(int(optimizer["percent"] or 100), 100)
    if layers := found["offload_layers"]:
        values["offload_layers"] = int(layers["layers"])
    return values

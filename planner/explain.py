"""Why the first layout won: what the next one pays for, and which constraint binds."""


from planner.cost.estimate import PARTS, Estimate
from planner.cost.memory.states import COMPONENTS
from planner.errors import listed
from planner.layout import NAMES, Layout, Recompute, module_names
from planner.priced_layouts import safe_memory
from planner.search import SAFE, Finding
from planner.units import GIB, format_seconds

PART_TEXT = {
    "compute": "computation", "recompute": "recompute", "host": "kernel launches",
    "tensor_communication": "tensor-parallel communication", "context_communication": "context-parallel communication",
    "expert_communication": "expert all-to-all", "pipeline_communication": "pipeline sends", "bubble": "pipeline bubble",
    "stragglers": "waiting for the slowest GPU",
    "data_communication": "gradient and weight traffic", "optimizer": "optimizer step",
    "offload": "optimizer states on the host", "overhead": "fixed overhead",
}  # fmt: skip
COMPONENT_TEXT = {name: name.replace("_", " ") for name in COMPONENTS} | {"context": "driver context"}


def layout_text(layout: Layout) -> str:
    """A layout in one line: degrees and memory options."""
    return ", ".join([degrees_text(layout), *memory_options(layout)])


def degrees_text(layout: Layout) -> str:
    """The degrees of a layout, as flags are named; what is at its default is left out."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "ep", "etp")}
    words = [f"{name} {value}" for name, value in degrees.items() if value != 1 or name in ("tp", "pp", "dp")]
    words += [f"vpp {layout.vpp}"] if layout.vpp != 1 else []
    words += [f"b {layout.micro_batch_size}", f"m {layout.num_microbatches}"]
    words += [f"zero {layout.zero}"] if layout.zero else []
    words += [f"shard {layout.dp_shard}"] if layout.dp_shard and layout.dp_shard != layout.dp else []
    words += [NAMES["cp_method"][int(layout.cp_method)]] if layout.cp != 1 else []
    words += [NAMES["schedule"][int(layout.schedule)]] if layout.pp != 1 and layout.vpp == 1 else []
    if layout.first_stage_layers or layout.last_stage_layers:
        words.append(f"ends {layout.first_stage_layers or 'even'}/{layout.last_stage_layers or 'even'} layers")
    return ", ".join(words)


def recompute_text(layout: Layout) -> str:
    """What is computed again, in a word for a table: '', mlp, full, 30 layers."""
    if layout.recompute == Recompute.SELECTIVE:
        names = module_names(int(layout.recompute_modules))
        return names[0] if len(names) == 1 else f"{len(names)} modules"
    if layout.recompute == Recompute.FULL:
        return f"{layout.recompute_layers} layers" if layout.recompute_layers else "full"
    return ""


def host_text(layout: Layout) -> str:
    """What lies in host memory, in a word for a table: '', states, 50 % of states, activations, weights + states, all."""
    if layout.offload_parameters:
        return "all" if layout.offload_activations else "weights + states"
    share = "" if layout.offload_optimizer == 100 else f"{layout.offload_optimizer} % of "
    words = [f"{share}states"] if layout.offload_optimizer else []
    return ", ".join([*words, *(["activations"] if layout.offload_activations else [])])


def memory_options(layout: Layout) -> list[str]:
    """What a layout gives up to save memory, in words."""
    words = []
    if layout.recompute == Recompute.SELECTIVE:
        words.append(f"recompute of {listed(module_names(int(layout.recompute_modules)), 'and')}")
    elif layout.recompute == Recompute.FULL:
        part = f" of {layout.recompute_layers} layers per stage" if layout.recompute_layers else ""
        words.append(f"full recompute{part}")
    if layout.offload_optimizer:
        share = "" if layout.offload_optimizer == 100 else f"{layout.offload_optimizer} % of the "
        words.append(f"{share}optimizer states on the host")
    if layout.offload_activations:
        some = f" of {layout.offload_layers} layers" if layout.offload_layers else ""
        words.append(f"activations{some} on the host")
    if layout.offload_parameters:
        words.append("weights, gradients and optimizer states on the host")
    return words


def why_first(finding: Finding) -> str:
    """Against the runner-up, and what stands in the way of a faster layout."""
    sentences = []
    if memory_options(finding.layouts[0]):
        sentences.append(f"To fit, it takes {' and '.join(memory_options(finding.layouts[0]))}.")
    if finding.runner_up is not None:
        sentences.append(_against_runner_up(finding.estimates[0], *finding.runner_up))
    else:
        sentences.append("No other plan fits.")
    return " ".join([*sentences, binding(finding)])


def _against_runner_up(first: Estimate, layout: Layout, second: Estimate) -> str:
    behind = second.step_time[0] / first.step_time[0] - 1.0
    pays, saves = differences(second, first)
    text = f"The runner-up ({layout_text(layout)}) is {100 * behind:.1f} % slower"
    if behind < 0.005:
        text = f"The runner-up ({layout_text(layout)}) is as fast within 0.5 %"
    if pays:
        text += f": it pays {' and '.join(pays[:2])}"
    if saves:
        text += f", and saves {saves[0]}" if pays else f": it saves {saves[0]}"
    return text + "."


def differences(one: Estimate, other: Estimate) -> tuple[list[str], list[str]]:
    """What ``one`` pays more for than ``other`` and what it saves, as text by part, largest first."""
    gaps = [(float(one.time[part][0] - other.time[part][0]), part) for part in PARTS]
    gaps.sort(key=lambda gap: -abs(gap[0]))
    least = 0.002 * float(other.step_time[0])
    pays = [f"{format_seconds(gap)} more for {PART_TEXT[part]}" for gap, part in gaps if gap > least]
    saves = [f"{format_seconds(-gap)} of {PART_TEXT[part]}" for gap, part in gaps if gap < -least]
    return pays, saves


def binding(finding: Finding) -> str:
    """Which constraint binds: memory, a lack of legal layouts, or the largest loss of time other than computation."""
    first = finding.estimates[0]
    if finding.unlimited is not None:
        free_layout, free = finding.unlimited
        gain = 1.0 - float(free.step_time[0] / first.step_time[0])
        over = float(free.memory_peak[0] - free.usable_memory) / GIB
        if gain > 0.01:
            need = f"it needs {over:.1f} GiB more than the card has" if over > 0 else (
                f"its chance of running out is {100 * float(free.out_of_memory_probability[0]):.0f} %, above {100 * SAFE:.0f} %"
            )  # fmt: skip
            without = f"without its limit {layout_text(free_layout)} would take {100 * gain:.1f} % less time"
            return f"Memory binds: {without}, but {need}."
    losses = {part: float(first.time[part][0]) for part in PARTS if part not in ("compute", "overhead")}
    part = max(losses, key=lambda name: losses[name])
    share = losses[part] / float(first.step_time[0])
    if share < 0.02:
        return f"Computation binds: {100 * float(first.time['compute'][0] / first.step_time[0]):.0f} % of the step are kernels."
    what = "The network binds" if "communication" in part else "Time is lost"
    return f"{what}: the largest loss after computation is {PART_TEXT[part]}, {100 * share:.1f} % of the step."


def misses_by(found: Estimate) -> str:
    """By how much the closest attempt misses, and what most of its memory is.

    It needs what the allocator cannot give back."""
    safe = safe_memory(found.usable_memory, found.memory_error)
    over = float(found.memory_needed[0]) - safe
    if over <= 0:
        return "fits the GPU, but the node's host memory does not hold what is offloaded"
    largest = max(COMPONENTS, key=lambda name: float(found.memory[name][0]))
    return (
        f"misses by {over / GIB:.1f} GiB; a plan is safe up to {safe / GIB:.1f} of the card's {found.usable_memory / GIB:.1f} GiB, "
        f"and the largest component is {COMPONENT_TEXT[largest]}"
    )

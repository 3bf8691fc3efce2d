"""What the library holds, as tables and lines."""

from rich.table import Table

from planner import library
from planner.cost.parameters import active_parameters, total_parameters
from planner.hardware import load_hardware
from planner.model import load_model
from planner.model_names import aliases
from planner.terminal.tables import table
from planner.trainer import load_trainer
from planner.trainers.bundle.launchers import LAUNCHERS
from planner.trainers.targets import TARGETS, load_target
from planner.units import format_bytes, format_count


def models_table() -> Table:
    """Presets with their sizes and other names."""
    found = table("model", "parameters", "active", "layers", "hidden", "heads", "experts", "also called")
    others: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        others.setdefault(name, []).append(alias)
    for name in library.names("models"):
        model = load_model(name)
        heads = f"{model.num_heads}" + ("" if model.num_kv_heads == model.num_heads else f"/{model.num_kv_heads}")
        experts = f"{model.top_k} of {model.num_experts}" if model.is_moe else ""
        active = format_count(active_parameters(model)) if model.is_moe else ""
        found.add_row(
            name, format_count(total_parameters(model)), active, str(model.num_layers), str(model.hidden_size), heads,
            experts, ", ".join(others.get(name, [])),
        )  # fmt: skip
    return found


def hardware_table() -> Table:
    """Profiles with their peaks, links and whether their curves were measured."""
    found = table("hardware", "memory", "bf16 TFLOP/s", "domain", "link", "network per GPU", "USD/h", "GEMM curves")
    for name in library.names("hardware"):
        one = load_hardware(name)
        price = f"{one.prices[0].usd_per_hour:.2f} ({one.prices[0].date})" if one.prices else "-"
        found.add_row(
            name, format_bytes(one.usable_memory), f"{one.peak('bf16') / 1e12:.0f}", f"{one.scale_up_domain:.0f}",
            f"{one.scale_up_bandwidth / 1e9:.0f} GB/s", f"{one.network_bandwidth * 8 / 1e9:.0f} Gb/s", price,
            one.measured["gemm"],
        )  # fmt: skip
    return found


def trainers_table() -> Table:
    """Trainers with what they can do."""
    found = table("trainer", "what", "versions", "zero", "schedules", "context parallel", "experts")
    for name in library.names("trainers"):
        one = load_trainer(name)
        schedules, methods = ", ".join(one.legal.schedules) or "no pipeline", ", ".join(one.legal.cp_methods) or "none"
        found.add_row(
            name, one.title, ", ".join(one.choices.versions), ", ".join(map(str, one.legal.zero)), schedules, methods,
            one.legal.expert_parallel,
        )  # fmt: skip
    return found


def target_lines() -> list[str]:
    """One line per target of ``plan export``, and one of the launchers."""
    width = max(map(len, TARGETS))
    lines = [
        f"{one.name:{width}}  {one.title}; {one.package} {one.versions}; plans of {', '.join(one.trainers)}"
        for one in map(load_target, sorted(TARGETS))
    ]
    from planner.serving.export.serving_folder import TARGETS as SERVING

    served = [f"{name:{width}}  {title}; serve plans" for name, title in SERVING.items()]
    return [*lines, *served, f"launchers: {', '.join(LAUNCHERS)}"]

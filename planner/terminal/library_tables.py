"""What the library holds, as tables and lines."""

from collections.abc import Sequence

from rich.table import Table

from planner import library
from planner.cost.parameters import active_parameters, total_parameters
from planner.hardware import load_hardware
from planner.model import load_model
from planner.model_names import aliases
from planner.terminal.tables import table
from planner.trainer import known_as, load_trainer
from planner.trainers.bundle.launchers import LAUNCHERS
from planner.trainers.targets import TARGETS, load_target
from planner.units import format_bytes, format_count

ROOM = 110
"""Columns of a terminal from which a table says everything, with three spaces between columns."""
NAMES_ROOM = 118
"""Columns from which the longest other name of a model stands in one line."""


def _compact(headings: list[str], width: int) -> Table:
    """An empty table, its columns nearer to each other in a narrow terminal."""
    found = table(*headings)
    if width < 140:
        found.padding = (0, 1, 0, 0)
    return found


def models_called(words: Sequence[str]) -> list[str]:
    """Presets whose name, or one of their other names, holds every word."""
    called: dict[str, list[str]] = {name: [name] for name in library.names("models")}
    for alias, name in aliases().items():
        called[name].append(alias)
    return [name for name, known in called.items() if all(word.lower() in " ".join(known) for word in words)]


def models_table(width: int, names: Sequence[str] = ()) -> Table:
    """Presets (``names``, else all) with their sizes, and their other names where the ``width`` has room for them."""
    headings = ["=model", ">parameters", ">active", ">layers", ">hidden", ">heads", ">experts", "also called"]
    found = _compact(headings if width >= NAMES_ROOM else headings[:-1], width)
    others: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        others.setdefault(name, []).append(alias)
    for name in names or library.names("models"):
        model = load_model(name)
        heads = f"{model.num_heads}" + ("" if model.num_kv_heads == model.num_heads else f"/{model.num_kv_heads}")
        experts = f"{model.top_k} of {model.num_experts}" if model.is_moe else ""
        active = format_count(active_parameters(model)) if model.is_moe else ""
        cells = (
            name, format_count(total_parameters(model)), active, str(model.num_layers), str(model.hidden_size), heads,
            experts, ", ".join(others.get(name, [])),
        )  # fmt: skip
        found.add_row(*cells[: len(found.columns)])
    return found


def hardware_table(width: int) -> Table:
    """Profiles with their peaks, links and, where the ``width`` has room, whether their curves were measured."""
    headings = ["=hardware", ">memory", "~bf16 TFLOP/s", ">domain", ">link", "~network per GPU", "~USD/h", "GEMM curves"]
    found = _compact(headings if width >= ROOM else headings[:-1], width)
    for name in library.names("hardware"):
        one = load_hardware(name)
        price = f"{one.prices[0].usd_per_hour:.2f} ({one.prices[0].date})" if one.prices else "-"
        cells = (
            name, format_bytes(one.usable_memory), f"{one.peak('bf16') / 1e12:.0f}", f"{one.scale_up_domain:.0f}",
            f"{one.scale_up_bandwidth / 1e9:.0f} GB/s", f"{one.network_bandwidth * 8 / 1e9:.0f} Gb/s", price,
            one.measured["gemm"],
        )  # fmt: skip
        found.add_row(*cells[: len(found.columns)])
    return found


def trainers_called(words: Sequence[str]) -> list[str]:
    """Trainers whose name holds every word, or that are called so elsewhere."""
    known = library.names("trainers")
    found = [name for name in known if all(word.lower() in name for word in words)]
    return found or [name for name in known if name == known_as(" ".join(words))]


def trainers_table(width: int, names: Sequence[str] = ()) -> Table:
    """Trainers (``names``, else all) with what they can do and, where the ``width`` has room, their titles."""
    titles = width >= ROOM
    headings = ["=trainer", *(["what"] if titles else []), "versions", "zero", "schedules", "context parallel", "experts"]
    found = _compact(headings, width)
    for name in names or library.names("trainers"):
        one = load_trainer(name)
        schedules, methods = ", ".join(one.legal.schedules) or "no pipeline", ", ".join(one.legal.cp_methods) or "none"
        found.add_row(
            name, *([one.title] if titles else []), ", ".join(one.choices.versions), ", ".join(map(str, one.legal.zero)), schedules,
            methods, one.legal.expert_parallel,
        )  # fmt: skip
    return found


def _plans_of(trainers: Sequence[str]) -> str:
    return "every trainer" if len(trainers) == len(library.names("trainers")) else ", ".join(trainers)


def target_lines() -> list[str]:
    """One line per target of ``plan export``, and one of the launchers."""
    width = max(map(len, TARGETS))
    lines = [
        f"{one.name:{width}}  {one.title}; {one.package} {one.versions}; plans of {_plans_of(one.trainers)}"
        for one in map(load_target, sorted(TARGETS))
    ]
    from planner.serving.export.serving_folder import TARGETS as SERVING

    served = [f"{name:{width}}  {title}; serve plans" for name, title in SERVING.items()]
    from planner.rl.export.rl_targets import TARGETS as RL

    trained = [f"{name:{width}}  {one.title}; RL plans" for name, one in RL.items()]
    return [*lines, *served, *trained, f"launchers: {', '.join(LAUNCHERS)}"]

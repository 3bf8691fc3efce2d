"""Adapters that a job of ms-swift goes on with."""

from planner.errors import shown
from planner.trainers.reading.given import Question
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.text import shown_text


def goes_on(given: Settings, *names: str) -> bool:
    """Whether one of these settings names adapters; their rank is asked for where it is not said.
    [base_args.py, load_args_from_ckpt; megatron_args.py, __post_init__]"""
    found = next((given.data[one] for one in names if given.data.get(one) is not None), None)
    given.asked.update((*names, "ref_adapters"))  # which they are decides nothing
    if found is not None and given.get("lora_rank") is None:
        given.ask(Question(name="lora_rank", about=f"that of {shown(shown_text(str(found)))}, whose adapters it goes on with"))
    return found is not None

"""A sweep as a picture: throughput of the job and of one GPU over the number that was varied."""

from pathlib import Path

from planner.questions.what_if.numbers import WhatIf
from planner.terminal.pictures import new_figure, write_picture


def sweep_plot(found: WhatIf, path: Path) -> bool:
    """Write the picture as PNG, whole or not at all: left tokens/s of the job with the ideal line, right per GPU.

    Numbers at which nothing fits are crosses on the axis. False where fewer than two points were found. Raises PlannerError
    without matplotlib.
    """
    flag, resolved = found.asked.sweep or "", found.asked.resolved
    if flag not in (swept := found.sweeps(least=2)):
        return False
    rows = swept[flag]
    figure = new_figure(10.0, 4.2, dpi=120)
    left, right = figure.subplots(1, 2)
    fit = [row for row in rows if row.prediction is not None]
    numbers = [row.number or 0.0 for row in fit]
    per_gpu = [row.prediction.tokens_per_second_per_gpu for row in fit if row.prediction is not None]
    total = [row.tokens_per_second or 0.0 for row in fit]
    left.plot(numbers, total, "o-", color="C0", label="best plan")
    if flag == "gpus" and fit:
        left.plot(numbers, [total[0] * n / numbers[0] for n in numbers], ":", color="0.5", label="as the first per GPU")
        left.legend(frameon=False)
    right.plot(numbers, per_gpu, "o-", color="C1")
    missing = [row.number or 0.0 for row in rows if row.prediction is None]
    for axes, heading in ((left, "tokens/s of the job"), (right, "tokens/s per GPU")):
        axes.set_xscale("log", base=2)
        if axes is left and flag == "gpus" and fit:
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(0.0, 1.08 * max(per_gpu if axes is right else total, default=1.0))
        if missing:
            axes.plot(
                missing, [axes.get_ylim()[0]] * len(missing), "x", color="C3", label="nothing fits", clip_on=False
            )
            axes.legend(frameon=False)
        axes.set_xticks([row.number or 0.0 for row in rows], [f"{row.number:,g}" for row in rows], rotation=45)
        axes.minorticks_off()
        axes.set(xlabel=flag.replace("_", " "), ylabel=heading)
        axes.grid(alpha=0.25)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(f"{resolved.job.model.name}, {resolved.hardware}, {resolved.trainer}", fontsize=10)
    write_picture(figure, path)
    return True

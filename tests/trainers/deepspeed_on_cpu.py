"""DeepSpeed's processes on the CPU: accelerate starts its communication on GPUs alone. Started by torchrun before a script."""

from __future__ import annotations

import runpy
import sys

import deepspeed

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

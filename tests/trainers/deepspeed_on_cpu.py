"""DeepSpeed's processes on the CPU: accelerate starts its communication on GPUs alone. Started by torchrun before a script."""

from __future__ import annotations

import os
import runpy
import sys

import deepspeed

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may drop the last tensors while Python ends, which aborts: not part of what is tested

"""Runs the script that SCRIPT names; accelerate takes its CPU processes for GPU ones.

accelerate turns FSDP on where its processes have accelerators. All that is changed here
is what it takes them for: tensors stay on the CPU, collectives are gloo's.
"""

from __future__ import annotations

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv[0] = os.environ["SCRIPT"]
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")

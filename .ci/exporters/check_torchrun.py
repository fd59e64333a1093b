"""Scripts for torchrun: sh -n, shellcheck, and torchrun's own parser (torch 2.13.0)."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same
from launcher_plans import launcher_plans
from shell_scripts import PACKAGE, check_script


def _check(folder: Path, plan: dict[str, Any]) -> None:
    from torch.distributed.run import get_args_parser

    text = (folder / "run.sh").read_text()
    check_script(text, "sh")
    last = text.rstrip().splitlines()[-1]
    os.environ |= {"NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    words = [os.path.expandvars(word) for word in shlex.split(last)]
    same("the command", words[:2], ["exec", "torchrun"])
    given = get_args_parser().parse_args(words[2:])
    ranks = int(given.nnodes.partition(":")[0]) * int(given.nproc_per_node)
    same("ranks", ranks, plan["cluster"]["num_devices"])
    same("what it starts", given.training_script, "meshwright")
    assert given.no_python
    if not given.standalone:
        same("node rank", given.node_rank, 1)
        same("first host", given.master_addr, "first")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    packages = ["torch==2.13.0", "numpy", PACKAGE]
    sys.exit(check_in_environment(__file__, "torchrun", launcher_plans(), packages))

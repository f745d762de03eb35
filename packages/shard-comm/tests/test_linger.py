"""A process that ends right after a collective ends well."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

import torch
import torch.distributed as dist

from shard_comm import GroupComm, _linger

_linger.GRACE_S = 2.0  # however busy the machine is
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = GroupComm()
out, inp = torch.empty(1 << 20), torch.ones(1 << 20)
sys.setswitchinterval(1000.0)  # from here on no other thread gets in unless this one waits
comm.all_gather(out, inp)
print(int(out.sum()), flush=True)
"""


def test_the_interpreter_ends_after_the_threads_of_gloo_let_go() -> None:
    """The comm is a global, so its group lives, and has tensors to drop, until the very end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(1 << 20)]), done.stderr

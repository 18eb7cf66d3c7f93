"""Runs of a script in cheap forks, in the place of `launch.ScriptRun`; and a script to run.

The forks are those of `processes`.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import processes

from amp_patch.apex.process import environment_of_run
from amp_patch.tools.launch import OPTIONS, TOOL


class ForkedRun:
    """Has run when it is made; arguments and results are those of `launch.ScriptRun`."""

    def __init__(
        self,
        command: Sequence[str],
        tool: str,
        options: Mapping[str, Any],
        log: Path,
        opt_level: str | None = None,
        environment: Mapping[str, str] | None = None,
        start: object = None,
    ) -> None:
        added = {TOOL: tool, OPTIONS: json.dumps(dict(options)), **(environment or {})}
        env = {**environment_of_run(os.environ, opt_level, force=True), **added}
        done = processes.run(command, env=env)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        self.log, self.code = log, done.returncode

    def __enter__(self) -> ForkedRun:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, seconds: float) -> int:
        return self.code

    def stop(self) -> None:
        pass


#: Overflows in float16 in module "2", in the product; in fp32 it learns.
SCRIPT = """
    import torch
    from torch import nn
    from {amp} import amp

    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)
        def forward(self, x):
            return self.up(x) * 1e6 * 1e-6

    layers = nn.Linear(4, 8), nn.Dropout(0.5), Scaled(), nn.ReLU(), nn.Linear(8, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    inputs = torch.randn(64, 4)
    targets = (inputs[:, 0] > 0).long()
    for step in range(40):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print("accuracy:", (model(inputs).argmax(1) == targets).float().mean().item())
"""


def write_script(folder: Path, amp: str = "amp_patch") -> str:
    """Write the script, which imports amp from that package, and return its path."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(amp=amp)), encoding="utf-8")
    return str(path)

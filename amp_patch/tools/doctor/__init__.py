"""``amp-patch doctor``: what is installed, whether it works, and which level to start with."""

from __future__ import annotations

import sys

import click
import torch

from amp_patch.tools.options import Duration

from . import compilation, installation, machine, self_test, speed
from .advice import advise
from .finding import Finding
from .report import Report, show


def examine(seconds: float) -> Report:
    """Look at this machine; about so many seconds are for measuring speed."""
    here = machine.look()
    device = torch.device("cuda" if here.gpus else "cpu")
    threads = torch.get_num_threads()
    on_cpu = f"the CPU, {threads} thread{'s' * (threads > 1)}"
    name = here.gpus[0].name if here.gpus else on_cpu
    findings = installation.judge(here)
    compiled = compilation.compile_all(here)
    tested = self_test.check_levels(device)
    findings += [*compilation.judge(here, compiled), *self_test.judge(tested)]
    try:
        speeds = speed.measure(device, seconds)
    except RuntimeError as error:  # of torch: out of memory, no kernel for this GPU
        speeds = []
        findings.append(Finding("speed", "broken", f"the speed could not be measured: {error}"))
    return Report(name, findings, compiled, speeds, tested, advise(speeds, tested))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for machines.")
@click.option(
    "--seconds",
    type=Duration(may_be_zero=True),
    default=10.0,
    show_default=True,
    metavar="N",
    help="How long the speed is measured.",
)
def command(as_json: bool, seconds: float) -> None:
    """Say whether mixed precision works here, and is fast.

    Looks at Python, torch, cupy, CUDA's compiler and the environment; compiles the CUDA kernels;
    makes one training step at each level, against float64; measures float16 and bfloat16 against
    float32; names the level to start with. Exit code: 0 all is well, 1 something is broken.
    """
    report = examine(seconds)
    if as_json:
        click.echo(report.to_json())
    else:
        show(report)
    sys.exit(0 if report.is_well else 1)

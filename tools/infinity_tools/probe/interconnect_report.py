"""The command line behind `infinity probe --interconnect`: progress, table and file."""

from __future__ import annotations

import json as json_format
from pathlib import Path

import torch.distributed as dist
import typer
from rich.console import Console
from rich.text import Text

from infinity import torchrun
from infinity.estimate.network import COLLECTIVES
from infinity.units import format_size
from infinity_tools.output import check_out, write_out
from infinity_tools.probe.interconnect import LABELS, Interconnect, measure
from infinity_tools.tables import table

FILE = "interconnect.json"
"""Name of the results in the `--out` folder."""


def probe_interconnect(seconds: float, out: Path | None, *, json: bool) -> None:
    """Measure the interconnect on all ranks. Rank 0 prints the results and writes the file.

    Raises the same exceptions as `measure`.
    """
    first = torchrun.number("RANK", 0) == 0
    if out is not None and first:
        check_out(out)
    console = Console(stderr=True)
    try:
        if json or not first:
            found = measure(seconds)
        else:
            with console.status("connecting") as status:
                found = measure(seconds, status.update)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if found is None:
        return
    text = json_format.dumps(found.document(), indent=2)
    if out is not None:
        write_out(out, {FILE: text + "\n"}, {})
    if json:
        typer.echo(text)
    else:
        show(Console(highlight=False), found, out)


def show(console: Console, found: Interconnect, out: Path | None) -> None:
    """Print the results."""
    network, sent = found.network, found.network.sent
    rows = []
    for name in COLLECTIVES:
        for number, (nbytes, seconds) in enumerate(getattr(network, name)):
            bits = f"{8e-9 * sent[name] * nbytes / seconds:.3g}" if sent[name] else ""
            label = "" if number else LABELS[name]
            rows.append((label, format_size(nbytes), f"{1e3 * seconds:.3g}", f"{1e-6 * nbytes / seconds:.0f}", bits))
    several, more = network.nodes > 1, network.ranks_per_node > 1
    title = (
        f"collectives on {network.nodes} node{'s' * several} with {network.ranks_per_node} rank{'s' * more}"
        f"{' each' * several}, {found.backend}"
    )
    console.print(table(title, ("collective", ">tensor", ">ms", ">MB/s", ">Gbit/s sent per node"), rows))
    console.print()
    console.print(Text("tensor: size before sharding; MB/s: this size divided by the time"))
    options = f"--nodes {network.nodes} --ranks {network.ranks_per_node}"
    if out is not None:
        console.print(Text(f"wrote {out / FILE}, for `infinity plan {options} --interconnect {out / FILE}`"))
    else:
        console.print(Text(f"pass --out to write {FILE} for `infinity plan {options} --interconnect`"))

"""List of presets, for `--model list`."""

from __future__ import annotations

import json as json_format

import typer


def list_presets(*, json: bool) -> None:
    """Print the presets. The imports are local because --help does not need them."""
    from rich.console import Console
    from rich.table import Table

    from infinity_tools.presets import PRESETS, count_parameters, find_model, on_meta

    table = Table("preset", "parameters", "vocabulary", "description", box=None, header_style="bold")
    table.columns[1].justify = table.columns[2].justify = "right"
    listed = []
    for name, preset in PRESETS.items():
        source = find_model(name)
        parameters, vocabulary = count_parameters(on_meta(source)), source.config.vocab_size
        listed.append({"name": name, "parameters": parameters, "vocabulary": vocabulary, "description": preset.doc})
        table.add_row(name, f"{parameters / 1e6:.4g} M", str(vocabulary), preset.doc)
    if json:
        typer.echo(json_format.dumps(listed))
    else:
        Console().print(table)

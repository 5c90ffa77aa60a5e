"""Tests of the figures in README.md and docs/reference/results.md: they equal the stored benchmark results."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "reference" / "results.md").read_text()
DEVICES = {
    "drive": "drive, 2 of 2",
    "loop device in memory": "loop device in memory, 2 of 2",
    "drive, 1 of 2 cores compute": "drive, 1 of 2",
    "loop device in memory, 1 of 2 cores compute": "loop device in memory, 1 of 2",
}
"""Names of the devices of step.json in the table of step times."""


def stored(name: str) -> Any:
    """Return the stored results of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def section(text: str, title: str) -> str:
    """Return the text under a heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def step_rows() -> list[str]:
    """Return the rows of the step time table."""
    large, limits = (stored(name)["devices"]["drive"]["by_tokens"]["512"] for name in ("step-354m", "step-354m-limits"))
    measured = [("355M, drive, 2 of 2", "512", large | {name: limits[name] for name in limits if "roofline" in name})]
    for device, found in stored("step")["devices"].items():
        measured += [(f"114M, {DEVICES[device]}", tokens, row) for tokens, row in found["by_tokens"].items()]
    rows = []
    for name, tokens, row in measured:
        ratios = (
            row["over_in_memory"]["infinity"],
            row["over_torch"],
            row["roofline_ratio"],
            row["roofline_with_cores"],
        )
        figures = (row["step_seconds"]["infinity"], *ratios)
        rows.append(f"| {name} | {tokens} | " + " | ".join(f"{one['median']:.2f}" for one in figures) + " |")
    return rows


def bytes_in_backward(*, least: bool) -> list[str]:
    """Return the bytes per parameter per step by host cache size, smallest first; or the theoretical minimum."""
    key = "least" if least else "bytes_per_parameter"
    rows = [row for row in stored("step")["bytes"] if (row["format"], row["schedule"]) == ("fp32", "in_backward")]
    return [f"{row[key]:.1f}" for row in sorted(rows, key=lambda row: row["share"])]


def checkpoint_rows() -> list[str]:
    """Return the rows of the checkpoint table."""
    found = stored("checkpoint")
    assert found["bytes_per_step"] == found["state_bytes"]
    seconds = {name: row["median"] for name, row in found["seconds"].items()}
    return [
        f"| Written per step (the state once), GB | {found['bytes_per_step'] / 1e9:.2f} |",
        f"| Bytes added by a checkpoint in every step | {100 * found['extra_bytes_ratio']['median']:.3f} % |",
        f"| `save_checkpoint()`, s | {seconds['checkpoint']:.3f} |",
        f"| `save_checkpoint()`, relative to writing the state once | {found['checkpoint_ratio']['median']:.3f} |",
        f"| `torch.save`, s | {seconds['save']:.1f} |",
        f"| `torch.distributed.checkpoint`, s | {seconds['dcp']:.1f} |",
    ]


def daemon_rows() -> list[str]:
    """Return the rows of the `infinityd` table."""
    found = stored("daemon")
    names = {
        "Two runs on one drive, with `infinityd`: deviation from weights of 1:1 and 3:1": "fair_worst_ratio",
        "Two runs on one drive, without `infinityd`": "fair_without",
        "Two drives of different speed, relative to the sum of both alone": "two_drives_of_sum",
        "The same after one drive has become slower": "two_drives_after_change",
        "Step time with an idle `infinityd`, relative to a node without it": "alone_over_without",
        "Step time with a stopped `infinityd`, relative to a node without it": "stopped_over_without",
        "Part of a step that updates counters": "telemetry_share_of_step",
    }
    rows = [
        f"| {title} | {f'{found[name]:.2g}' if found[name] < 0.1 else f'{found[name]:.2f}'} |"
        for title, name in names.items()
    ]
    return [
        *rows,
        f"| Series on a node with 8 ranks and 4 drives | {found['series']} |",
        f"| CPU time of a scrape on this node, s | {found['scrape_cpu_seconds']:.3f} |",
    ]


def prediction_rows() -> list[str]:
    """Return the rows of the `infinity plan` and `infinity tune` tables."""
    plan, tune = stored("plan"), stored("tune")
    median, worst, before, worst_before, moved = (
        100 * plan[name]
        for name in ("time_error_median", "time_error_worst", "before_error_median", "before_error_worst",
                     "bytes_error_worst")
    )  # fmt: skip
    return [
        f"| Bytes per step | | {moved:.1f} % |",
        f"| Seconds per step, from the rates of the run itself | {median:.1f} % | {worst:.1f} % |",
        f"| Seconds per step, before the run | {before:.1f} % | {worst_before:.0f} % |",
        f"| Step time of the best settings of a sweep, relative to the settings of `infinity tune` "
        f"| {tune['of_best']['median']:.2f} |",
        f"| Time of `infinity tune`, relative to the sweep | {tune['time_share']:.3f} |",
    ]


def test_format_costs_match_the_results() -> None:
    """The section on state formats gives the cost of an update in each format."""
    updates = stored("formats")["costs"]["updates"]
    said = [f"fp32 {updates['fp32']['reference']:.1f} ns"]
    said += [
        f"`{name}` {updates[name]['reference']:.1f} and {updates[name]['compiled']:.1f}"
        for name in ("split", "bf16-moments", "8bit")
    ]
    assert ", ".join(said) in " ".join((ROOT / "docs" / "explanation" / "state-formats.md").read_text().split())


def spread_of(row: dict[str, float]) -> str:
    """Return the median and range of a ratio, as formatted in the results."""
    return f"{row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})"


def first_step_rows() -> list[str]:
    """Return the rows of the table of the first and second steps, relative to later steps."""
    names = ("infinity", "infinity, clipping", "infinity, on demand", "FSDP2 in memory")
    return [
        f"| {tokens.removesuffix(' tokens')} | {which} | "
        + " | ".join(spread_of(found[name][f"{which}_over_others"]) for name in names)
        + " |"
        for tokens, found in stored("first_step")["rows"].items()
        for which in ("first", "second")
    ]


def engine_rows() -> list[str]:
    """Return the rows of the I/O engine table; the last column is `auto` relative to the better engine."""
    setups = {
        "engines": "drive",
        "engines-1loop": "one loop device in memory",
        "engines-2loops": "two loop devices in memory",
        "engines-2ranks": "drive, two ranks",
    }
    rows = []
    for name, title in setups.items():
        found = stored(name)
        over = {engine: spread_of(row["over_threads"]) for engine, row in found["rows"].items()}
        ring = over["io_uring, one ring"] if found["ranks"] == 1 else ""
        better = min(("io_uring", "threads"), key=lambda engine: found["rows"][engine]["step_seconds"]["median"])
        assert found["auto"] == better == "io_uring"
        idle = found["rows"]["io_uring"]["idle"]["1 MiB"]["over_threads"]["median"]
        departs = found["auto_over_better"]["median"]
        rows.append(
            f"| [{title}](../../benchmarks/results/{name}.json) | {over['io_uring']} | {ring} | {idle:.2f} | "
            f"{departs:.2f} |"
        )
    return rows


def activation_rows() -> list[str]:
    """Return the rows of the activation table."""
    rows = []
    for tokens, row in stored("activations")["rows"].items():
        tiers = row["device"], row["nvme"]
        peaks = " | ".join(f"{tier['peak_bytes'] / 2**20:.0f}" for tier in tiers)
        seconds = " | ".join(f"{tier['step_seconds']:.1f}" for tier in tiers)
        moved, kept = tiers[1]["moved_bytes"] / 2**21, tiers[1]["kept_bytes"] / 2**20
        rows.append(f"| {tokens.removesuffix(' tokens')} | {peaks} | {seconds} | {moved:.0f} of {kept:.0f} |")
    return rows


def test_tables_match_the_results(subtests: pytest.Subtests) -> None:
    for rows in (checkpoint_rows, daemon_rows, prediction_rows, first_step_rows, engine_rows, activation_rows):
        with subtests.test(rows.__name__):
            assert [row for row in rows() if row not in RESULTS.splitlines()] == []


def gpu_variants() -> dict[str, Any]:
    """Return the variants of the GPU table. FSDP2 with CPU offload was measured in a separate session."""
    offload = stored("gpu-cpu-offload")["variants"]["fsdp_cpu_offload"]
    variants = list(stored("gpu")["variants"].items())
    return dict([*variants[:2], ("fsdp_cpu_offload", offload), *variants[2:]])


def gpu_rows() -> list[str]:
    """Return the rows of the GPU table."""
    rows = []
    for name, row in gpu_variants().items():
        planned = row.get("planned_seconds", {}).get("before")
        figures = (
            f"{row['step_seconds']['median']:.3f}", f"{row['over_in_memory']['median']:.2f}",
            f"{row['tflops']['median']:.0f}", f"{row['peak_device_bytes'] / 2**30:.1f}",
            f"{planned:.3f}" if planned else "",
        )  # fmt: skip
        rows.append(f"| `{name}` | " + " | ".join(figures) + " |")
    return rows


def test_gpu_figures_match_the_results() -> None:
    """Check both tables, the bitwise equality of the losses, and the bytes."""
    page, found = (ROOT / "docs" / "how-to" / "gpu.md").read_text(), stored("gpu")
    assert [row for row in page.splitlines() if re.match(r"\| `(fsdp|infinity)_\w+` \| \d", row)] == gpu_rows()
    titles = {"412M, 16,384": "gpu", "412M, 2,048": "gpu-2048-tokens", "2.0B, 16,384": "gpu-2b"}
    for title, name in titles.items():
        memory, host = (stored(name)["variants"][variant] for variant in ("fsdp_memory", "infinity_host"))
        cells = [memory["step_seconds"], host["step_seconds"]]
        seconds = " | ".join(f"{cell['median']:.3f}" for cell in cells)
        figures = f"{host['over_in_memory']['median']:.2f} | {host['tflops']['median']:.0f}"
        assert f"| {title} | {seconds} | {figures} |" in page
        assert stored(name)["losses"]["by_update_device"]["cuda"]["equal"]
    assert found["losses"]["by_update_device"]["cuda"]["variants"] == list(found["variants"])
    assert f"in all {found['losses']['steps']} steps" in " ".join(page.split())
    for variant in ("infinity_host", "infinity_nvme"):
        for name, moved in found["variants"][variant]["bytes"].items():
            planned = moved["planned"] or moved["planned_before"]
            assert abs(moved["measured"] - planned) <= 0.04 * planned, (variant, name)


def test_step_time_table_matches_the_results() -> None:
    assert [row for row in RESULTS.splitlines() if row.startswith(("| 355M, ", "| 114M, "))] == step_rows()


def test_other_figures_match_the_results() -> None:
    """Bytes by host cache size, I/O engine ratios, and the size of the state."""
    lines = RESULTS.splitlines()
    io, large = stored("io"), stored("step-354m")["devices"]["drive"]
    for title, least in (("planned", False), ("least possible", True)):
        assert f"| {title} | {' | '.join(bytes_in_backward(least=least))} |" in lines
    stored_bytes = [
        row for row in stored("step")["bytes"] if (row["format"], row["schedule"]) == ("fp32", "in_backward")
    ]
    shares = " | ".join(f"{100 * share:.0f}" for share in sorted(row["share"] for row in stored_bytes))
    assert f"| host cache, % of the state | {shares} |" in lines
    for op in ("read", "write"):
        ratios = [f"{io[f'{op}_ratio'][kind]:.2f}" for kind in ("io_uring", "threads")]
        assert f"| {op} | {' | '.join(ratios)} |" in lines
    state, parameters = large["state_bytes"], large["parameters"]
    assert f"{state / 1e9:.2f} GB, or {state / parameters:.1f} bytes per parameter" in " ".join(RESULTS.split())


def readme_rows() -> list[str]:
    """Return the rows of README's comparison: systems on the CPU, and the same systems on a GPU."""
    columns = {
        "FSDP2": ("FSDP2 in memory", "fsdp_memory"),
        "FSDP2 + `CPUOffloadPolicy`": ("FSDP2, CPUOffloadPolicy", "fsdp_cpu_offload"),
        "DeepSpeed ZeRO-Infinity": ("DeepSpeed, all on NVMe", ""),
        "`infinity`": ("infinity fp32", "infinity_nvme"),
    }
    peers, variants = stored("peers"), gpu_variants()
    rows = []
    for title, (system, variant) in columns.items():
        found = peers[system]["100m"]["1 ranks"]
        few, many = found["64 tokens"], found["512 tokens"]
        times = [
            f"{row['step_seconds']['median']:.2f} ({row.get('over_infinity', {'median': 1.0})['median']:.2f}\u00d7)"
            for row in (few, many)
        ]
        cells = (
            title, f"{many['peak_rss_bytes'] / 2**30:.2f}", f"{many['bytes_per_parameter']:.1f}", *times,
            f"{found['save_seconds']:.2f}", "yes" if found["resume_equal"] else "no",
            f"{variants[variant]['step_seconds']['median']:.3f}" if variant else "\u2013",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_readme_comparison_matches_the_results() -> None:
    """Every row, and every decimal number near the table, is a stored measurement."""
    comparison = section(README, "Comparison")
    rows = [line for line in comparison.splitlines() if line.startswith("| ")][1:]
    assert rows == readme_rows()
    small, half, large = (bytes_in_backward(least=False)[index] for index in (0, 3, 5))
    assert f"5%, 50% or 90% of the state, `infinity` moves {small}, {half} or {large} bytes per parameter" in comparison
    known = set(re.findall(r"\d+\.\d+", " ".join(readme_rows()))) | {small, half, large}
    config = stored("gpu")["config"]
    assert (
        f"--layers {config['layers']} --tokens {config['tokens']} --cap-fraction {config['cap_fraction']}" in comparison
    )
    assert f"{stored('gpu')['model']['parameters'] / 1e6:.0f}M parameters" in comparison
    assert set(re.findall(r"\d+\.\d+", comparison)) == known | {str(config["cap_fraction"])}


def test_readme_limits_match_the_results() -> None:
    limits = section(README, "When not to use it")
    rows = {tuple(row.split(" | ")[:2]): row.split(" | ")[2:] for row in step_rows()}
    few, many = (rows["| 114M, drive, 2 of 2", tokens][1] for tokens in ("32", "1024"))
    assert re.search(rf"{few} times as long as .* at 32 tokens per step, and {many} times as long at 1,024", limits)
    state = f"{stored('step-354m')['devices']['drive']['state_bytes'] / 1e9:.2f}"
    assert f"for 355M parameters, the state is {state} GB" in limits
    written = f"{1000 * stored('checkpoint')['bytes_per_step'] / 1e12:.2f}"
    assert f"up to {written} TB in 1,000 steps for 114M parameters" in limits
    assert set(re.findall(r"\d+\.\d+", limits)) == {few, many, state, written}


def test_readme_is_short() -> None:
    """The number of lines and of links (including images) is limited."""
    assert len(README.splitlines()) <= 150
    assert README.count("](") <= 15


def test_every_guarantee_names_an_existing_test() -> None:
    """Each of the five guarantees links to a file that contains the test that enforces it."""
    guarantees = re.split(r"^\d\. ", section(README, "Guarantees"), flags=re.MULTILINE)[1:]
    assert len(guarantees) == 5
    for guarantee in guarantees:
        (found,) = re.findall(r"\[`(test_\w+)`\]\((tests/[^)]+)\)", guarantee)
        assert f"def {found[0]}(" in (ROOT / found[1]).read_text(), guarantee


def test_source_files_named_in_documents_exist() -> None:
    """Paths may be relative to the repository, to `infinity/` or to `tests/`."""
    roots = (ROOT, ROOT / "infinity", ROOT / "tests")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, path) for page in pages for path in re.findall(r"`([\w/*]+/[\w*]+\.py)[`:]", page.read_text())}
    assert len(named) > 20
    assert not [(page, path) for page, path in sorted(named) if not any(list(root.glob(path)) for root in roots)]


def test_folders_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for row in re.findall(r"^\| .+? \| (`infinity/.+?) \|$", text, re.MULTILINE):
        for path in re.findall(r"`([\w./]+)`", row):
            assert any((root / path).exists() for root in (ROOT, ROOT / "infinity")), path


def network_rows() -> list[str]:
    """Return the rows of the table of planned and measured steps on two nodes."""
    rows = []
    for row in stored("network")["setups"]:
        planned, measured = row["planned"], row["measured"]
        sharding = {"full_shard": "full shard", "hsdp": "HSDP"}[row["sharding"]]
        cells = (
            str(row["megabits"]), f"2 \u00d7 {row['ranks']}", sharding,
            f"{row['micro_batches']}{'' if row['layer_major'] else ' (loop)'}",
            f"{planned['seconds']:.2f}", f"{measured['seconds']:.2f}",
            f"{100 * (planned['seconds'] / measured['seconds'] - 1):+.0f} %",
            f"{planned['sent_bytes'] / 1e6:.1f}", f"{measured['sent_bytes'] / 1e6:.1f}",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def accumulation_rows() -> list[str]:
    """Return the rows of the table of bytes sent per step, by number of micro-batches."""
    found = {(row["micro_batches"], row["layer_major"]): row for row in stored("network")["accumulation"]}
    rows = []
    for number in sorted({number for number, _ in found}):
        pair = [found.get((number, layer_major), found[number, True]) for layer_major in (True, False)]
        cells = [f"{row['sent_bytes'] / 1e6:.1f}" for row in pair]
        rows.append(f"| {number} | {' | '.join(cells)} |")
    return rows


def error_words(quantity: str, errors: list[float]) -> str:
    """Return the words that state the errors of a prediction."""
    return f"{quantity}: median {100 * statistics.median(errors):.0f} %, worst {100 * max(errors):.0f} %"


def test_network_tables_match_the_results() -> None:
    """A loop sends as much for each micro-batch as layer-major accumulation does per step."""
    found, text = stored("network"), " ".join(section(RESULTS, "Figures").split())
    assert f"Number of rounds: {found['rounds']}" in text
    steps = [row["error"] for row in found["setups"]]
    assert error_words("step time", steps) in text
    assert statistics.median(steps) <= 0.15
    full = [row for row in found["setups"] if row["sharding"] == "full_shard"]
    errors = [abs(row["planned"]["network_seconds"] / row["measured"]["collective"] - 1) for row in full]
    assert error_words("time of collectives", errors) in text
    assert statistics.median(errors) <= 0.15
    assert [row for row in RESULTS.splitlines() if " | 2 \u00d7 " in row] == network_rows()
    page = (ROOT / "docs" / "explanation" / "accumulation.md").read_text()
    assert [row for row in page.splitlines() if re.match(r"\| \d", row)] == accumulation_rows()


def systems(name: str) -> dict[str, Any]:
    """Return the results of a benchmark by system, without failures."""
    return {system: sizes for system, sizes in stored(name).items() if system != "failures"}


def over_of(row: dict[str, Any]) -> str:
    """Return the step time relative to infinity's, which is 1.00 for infinity itself."""
    return spread_of(row["over_infinity"]) if "over_infinity" in row else "1.00"


def moved_and_peak(row: dict[str, Any]) -> str:
    """Return the two cells that all peer tables share: bytes per parameter and peak memory."""
    return f"{row['bytes_per_parameter']:.1f} | {row['peak_rss_bytes'] / 2**30:.2f}"


def peer_rows() -> list[str]:
    """Return the rows of the table that compares systems on one rank."""
    rows = []
    for name, sizes in systems("peers").items():
        found = sizes["100m"]["1 ranks"]
        small, large = found["64 tokens"], found["512 tokens"]
        over = [row["over_infinity"]["median"] if "over_infinity" in row else 1.0 for row in (small, large)]
        times = [
            f"{row['step_seconds']['median']:.2f} | {ratio:.2f}"
            for row, ratio in zip((small, large), over, strict=True)
        ]
        group = found.get("smallest_cgroup_bytes")
        drive = f"{small['drive_bytes'] / 1e9:.2f} | {found['drive_bytes_saved'] / 1e9:.2f}"
        rows.append(
            f"| {name} | {times[0]} | {times[1]} | {moved_and_peak(large)} | "
            f"{f'{group / 2**30:.2f}' if group else ''} | {drive} | "
            f"{found['save_seconds']:.2f} | {'yes' if found['resume_equal'] else 'no'} |"
        )
    return rows


def two_rank_rows() -> list[str]:
    """Return the rows of the table that compares systems on two ranks."""
    rows = []
    for name, sizes in systems("peers").items():
        found = sizes.get("100m", {}).get("2 ranks")
        if found and "failed" in found:
            rows.append(f"| {name} | failed: {found['failed']} | | | |")
        elif found:
            row = found["512 tokens"]
            rows.append(f"| {name} | {row['step_seconds']['median']:.2f} | {over_of(row)} | {moved_and_peak(row)} |")
    return rows


def larger_rows() -> list[str]:
    """Return the rows of the table that compares systems at 354M parameters."""
    rows = []
    for name, sizes in systems("peers").items():
        if found := sizes.get("354m", {}).get("1 ranks"):
            measured = [found.get(f"{tokens} tokens") for tokens in (512, 2048)]
            times = [f"{row['step_seconds']['median']:.1f} | {over_of(row)}" if row else " | " for row in measured]
            row = found["512 tokens"]
            rows.append(f"| {name} | {' | '.join(times)} | {moved_and_peak(row)} | {row['drive_bytes'] / 1e9:.2f} |")
    return rows


def avx512_rows() -> list[str]:
    """Return the rows of the AVX-512 table at 354M parameters, by tokens, ranks and drives."""
    return [
        f"| {name} | {ranks.split()[0]} | {tokens} | {drive.removeprefix(', drive of ').removesuffix('MB')} | "
        f"{row['step_seconds']['median']:.1f} | {over_of(row)} | {moved_and_peak(row)} |"
        for name, sizes in systems("peers-avx512").items()
        for ranks, found in sizes.get("354m", {}).items()
        for key, row in found.items()
        for tokens, named, drive in [key.partition(" tokens")]
        if named
    ]


def save_rows() -> list[str]:
    """Return the rows of the table of save and resume times at 354M parameters with AVX-512."""
    return [
        f"| {name} | {row['save_seconds']:.2f} | {row['resume_seconds']:.2f} | {row['drive_bytes_saved'] / 1e9:.2f} |"
        for name in ("infinity fp32", "DeepSpeed, all on NVMe", "FSDP2 in memory")
        for row in [stored("peers-avx512")[name]["354m"]["1 ranks"]]
    ]


def statements_about_354m() -> list[str]:
    """Return the statements in the results about space and memory at 354M parameters."""
    found = stored("peers-avx512")
    infinity, deepspeed = (found[name]["354m"]["1 ranks"] for name in ("infinity fp32", "DeepSpeed, all on NVMe"))
    gpt2 = found["infinity fp32"]["gpt2-354m"]["1 ranks"]
    return [
        f"{infinity['drive_bytes_without_checkpoints'] / 1e9:.2f} GB without checkpoints",
        f"({deepspeed['drive_bytes'] / 1e9:.2f} GB during training)",
        f"smallest control group has {infinity['smallest_cgroup_bytes'] / 2**30:.2f} GiB",
        f"For GPT-2 medium, whose vocabulary has 50,257 tokens, it has {gpt2['smallest_cgroup_bytes'] / 2**30:.2f} GiB",
        f"peak is {gpt2['512 tokens']['peak_rss_bytes'] / 2**30:.2f} GiB",
        found["DeepSpeed, all on NVMe"]["1b"]["1 ranks"]["failed"].removeprefix("rank 0: "),
    ]


def test_peer_tables_match_the_results() -> None:
    """This includes the figures in the text below the tables."""
    for row in [*peer_rows(), *larger_rows(), *two_rank_rows(), *avx512_rows(), *save_rows()]:
        assert row in RESULTS.splitlines(), row
    for statement in statements_about_354m():
        assert statement in " ".join(RESULTS.split()), statement

"""Pictures of commands and of the dashboard for the documentation: docs/images/*.png. Run with `make docs-pictures`.

Each command runs with colors, as in a terminal. rich renders the output as SVG, and chromium, which must be installed
(Debian package `chromium`), converts it to PNG. `top` and the dashboard (`page`) show a run of two ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
WIDTH = 96
PLAN = (
    "plan --parameters 70e9 --layers 80 --hidden 8192 --vocabulary 128256 --host-memory 256GiB "
    "--nvme-bandwidth 7e9/5e9 --nvme-count 4 --gpu h100 --batch-tokens 32768"
)
DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True},
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "gradient_clipping": 1.0,
    "train_batch_size": 64,
}
COMMANDS = {
    "plan": PLAN,
    "doctor": "doctor nvme",
    "probe": "probe nvme --size 1GiB --seconds 0.2",
    "migrate": "migrate ds_config.json",
    "tune": "tune --model tiny --nvme nvme --host-memory 2MiB --batch-tokens 512 --seq 128 --minutes 1 --out tuned",
    "top": "top --once --interval 2",
}
TRAIN = (
    "train --model llama-100m --bf16 false --max_steps 1000 --host-memory 128MiB --nproc 2 --nvme nvme "
    "--save_strategy no --out run --metrics-port 0"
)
STEPS = 12  # of the run that the pictures show
PORT = 9479
PAGES = {"light": (1240, 1120, 1.0), "dark": (1240, 1120, 1.0), "phone": (360, 800, 2.0)}
"""Width, height and scale of each picture of the dashboard."""
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"><style>
text {{ font-family: "DejaVu Sans Mono", monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style><defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}"/></clipPath>{lines}</defs>{chrome}<g transform="translate({terminal_x}, {terminal_y})"
clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>"""
"""Template of rich, without the fonts that it would download."""


def surroundings(folder: Path) -> dict[str, str]:
    """Return environment variables with which commands see only the runs of this program."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(folder / "runtime")}


def run(words: str, folder: Path) -> str:
    """Return the output of a command, with colors."""
    environment = {**surroundings(folder), "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "infinity_tools", *words.split()],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    if done.returncode > 1:
        sys.exit(f"infinity {words}: {done.stderr}")
    return done.stdout.replace(str(folder), "")


def photograph(title: str, text: str, file: Path) -> None:
    """Render text with colors as a terminal, and write it as PNG."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(text), soft_wrap=True)
    svg = console.export_svg(title=title, code_format=_SVG)
    with tempfile.TemporaryDirectory() as place:
        drawn = Path(place, "terminal.svg")
        drawn.write_text(svg)
        width, height = (float(part) for part in svg.split('viewBox="0 0 ')[1].split('"')[0].split())
        chromium = shutil.which("chromium") or sys.exit(
            "chromium is not installed. Install it, e.g. with apt-get install chromium."
        )
        subprocess.run(
            [
                chromium,
                *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
                *("--hide-scrollbars", f"--window-size={int(width)},{int(height)}"),
                *(f"--user-data-dir={place}/profile", f"--screenshot={file}", f"file://{drawn}"),
            ],
            capture_output=True,
            check=True,
        )


@contextmanager
def background(module: str, words: str, folder: Path) -> Iterator[None]:
    """Run a command in the background."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *words.split()],
        cwd=folder, env=surroundings(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def photograph_page(folder: Path) -> None:
    """Write pictures of the dashboard."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.browser import browser

    with browser(folder / "browser") as tab:
        tab.open(f"http://127.0.0.1:{PORT}/")
        tab.until("document.querySelector('#drives article') && document.querySelector('#runs article')")
        for name, (width, height, scale) in PAGES.items():
            tab.emulate(width=width, height=height, scale=scale, dark=name == "dark")
            time.sleep(2)  # until the curves are drawn again
            (IMAGES / f"page-{name}.png").write_bytes(tab.screenshot())


def main() -> None:
    """Write the pictures named by the arguments (commands, or `page`), or all pictures."""
    names = sys.argv[1:] or [*COMMANDS, "page"]
    with tempfile.TemporaryDirectory(prefix="infinity-") as place, ExitStack() as running:
        folder = Path(place)
        (folder / "nvme").mkdir()
        (folder / "runtime").mkdir(mode=0o700)
        (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
        if {"top", "page"} & set(names):
            running.enter_context(background("infinity_daemon", f"--port {PORT}", folder))
            running.enter_context(background("infinity_tools", TRAIN, folder))
            log = folder / "run" / "steps.jsonl"
            while not log.exists() or len(log.read_text().splitlines()) < STEPS:
                time.sleep(1)
            if "page" in names:
                photograph_page(folder)
            if "top" in names:
                photograph("infinity top", run(COMMANDS["top"], folder), IMAGES / "command-top.png")
            running.close()
        for name in names:
            if name not in ("top", "page"):
                photograph(f"infinity {name}", run(COMMANDS[name], folder), IMAGES / f"command-{name}.png")


if __name__ == "__main__":
    main()

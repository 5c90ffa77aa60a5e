"""One compared system, in its own process and in the environment in which it is installed.

Commands arrive as lines of JSON on stdin, and answers are written as lines of JSON to the descriptor `--answers`, so
that output of a framework interferes with neither. The module does not import infinity unless infinity is the system,
so it also runs where only another system is installed. With several ranks, each rank is a separate process with the
variables of `torchrun`.

    {"do": "steps", "first": 3, "count": 2, "tokens": 512, "seq": 512}   train these steps, each on its own tokens
    {"do": "save"}                                                       save the state for a restart after a crash
    {"do": "end"}
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

KIB = 1024


def moved() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to drives."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def peak_rss() -> int:
    """Return the peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def batch(step: int, rank: int, vocabulary: int, tokens: int, seq: int) -> Any:
    """Return the tokens of a step, which are the same in all systems and differ between ranks."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (max(1, tokens // seq), min(tokens, seq)), generator=generator)


def train(system: Any, command: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Take steps; return the loss of each and its seconds by phase."""
    found = []
    for step in range(command["first"], command["first"] + command["count"]):
        tokens = batch(step, rank, system.vocabulary, command["tokens"], command["seq"])
        times = [time.perf_counter()]
        loss = system.forward(tokens)
        times.append(time.perf_counter())
        system.backward(loss)
        times.append(time.perf_counter())
        system.update()
        times.append(time.perf_counter())
        phases = dict(zip(("forward", "backward", "update"), map(float.__sub__, times[1:], times), strict=True))
        found.append({"step": step, "loss": float(loss), "seconds": times[-1] - times[0], **phases})
    return found


def main() -> None:
    """Build the system and execute commands until the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--model", required=True, help="folder of the pretrained model")
    parser.add_argument("--work", required=True, help="folder on the drive, used only by this system")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the system, as JSON")
    parser.add_argument("--answers", type=int, required=True, help="file descriptor for answers")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(options.answers, "w", buffering=1)
    began = time.perf_counter()
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", "0"))
    try:
        from systems import SYSTEMS

        system = SYSTEMS[options.system](
            options.model, Path(options.work), options.settings, resume=options.resume
        )  # fmt: skip
        answer = {"ready": time.perf_counter() - began, "parameters": system.parameters}
        print(json.dumps({**answer, "peak_rss_bytes": peak_rss()}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "end":
                break
            before, began = moved(), time.perf_counter()
            answer = {"steps": train(system, command, rank)} if command["do"] == "steps" else {}
            if command["do"] == "save":
                system.save()
            answer["seconds"] = time.perf_counter() - began
            system.flush_updates()
            read, written = (now - then for now, then in zip(moved(), before, strict=True))
            print(json.dumps({**answer, "read": read, "written": written, "peak_rss_bytes": peak_rss()}), file=answers)
        system.close()
    except BaseException as error:
        text = traceback.format_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "traceback": text}), file=answers)
        print(text, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

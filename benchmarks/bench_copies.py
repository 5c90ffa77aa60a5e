"""Delay of training steps while checkpoints are copied to another node.

    python benchmarks/bench_copies.py --nvme DIR --rate 20MiB

Two ranks with a host name, a folder and a daemon of their own act as two nodes. Every second checkpoint is copied, so
both variants alternate in the same run: a round has as many steps as a copy takes, and then the same number of steps
without a copy. The figure is the median of the ratios of their durations.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Start the daemons and the ranks, and print the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nvme", type=Path, required=True, help="folder on the drive")
    parser.add_argument("--rate", default="20MiB", help="run.copy_rate")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=16, help="layers with 1,024 by 1,024 weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(2):
                place = Path(folder, f"node{rank}")
                (place / "runtime").mkdir(0o700, parents=True)
                (place / "infinityd.toml").write_text('[copies]\nhost = "127.0.0.1"\nport = 0\n')
                command = [sys.executable, "-m", "infinity_daemon", "--runtime-dir", str(place / "runtime")]
                command += ["--config", str(place / "infinityd.toml"), "--port", "0"]
                processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
                while not (place / "runtime/infinityd.sock").exists():
                    time.sleep(0.1)
            values = json.dumps([options.rate, options.rounds, options.layers])
            ranks = []
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = str(server.getsockname()[1])
            for rank in range(2):
                command = [sys.executable, "-W", "ignore", __file__, "rank", str(Path(folder, f"node{rank}")), values]
                variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
            processes += ranks
            if failed := [status for process in ranks if (status := process.wait())]:
                sys.exit(f"a rank failed with exit status {failed[0]}")
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def train(place: Path, rate: str, rounds: int, layers: int) -> None:
    """Train as one rank, and print the figures on rank 0."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import infinity

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    socket.gethostname = lambda: place.name
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
    for layer in (*model, model):
        fully_shard(layer)
    (place / "nvme").mkdir()
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        {
            "storage": {"paths": [str(place / "nvme")]},
            "memory": {"host_bytes": "64MiB"},
            "run": {"copies": 2, "copy_rate": rate, "keep": "never", "heartbeat_timeout_seconds": 600},
            "telemetry": {"runtime_dir": str(place / "runtime")},
        },
    )
    (copier,) = optimizer._checkpointer._checkpoint_writer._copiers
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        steps = 0
        for copied in (True, False):
            optimizer.save_checkpoint()
            dist.barrier()
            start, done, busy = time.perf_counter(), 0, True
            while busy if copied else done < steps:
                model(torch.ones(256, 1024)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                busy = any(copier._ranks.collect(copier._busy()))
            steps = done
            times[copied].append((time.perf_counter() - start) / steps)
    state = optimizer.run.layout.state_bytes
    optimizer.close()
    if rank == 0:
        without, with_copy = (values[1:] for values in times)  # the first round also records the plan
        ratios = [one / other for one, other in zip(with_copy, without, strict=True)]
        print(
            f"{state / 2**20:.0f} MiB of state per rank, {rate}/s, {steps} steps per copy: "
            f"{1e3 * statistics.median(without):.0f} ms per step without a copy, "
            f"{1e3 * statistics.median(with_copy):.0f} ms with one; median ratio of {len(ratios)} rounds "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        train(Path(sys.argv[2]), *json.loads(sys.argv[3]))
    else:
        main()

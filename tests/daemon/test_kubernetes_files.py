"""Tests of the files in `deploy/` that need no cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infinity.config import load_config
from infinity_daemon import daemon_config

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"


def objects(name: str) -> dict[str, Any]:
    """Return the objects in a file by kind."""
    return {tree["kind"]: tree for tree in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())}


def pod_of(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["spec"]["template"]["spec"]


def mounts(pod: dict[str, Any]) -> dict[str, str]:
    """Return the host path of each mount of the main container."""
    host = {volume["name"]: volume.get("hostPath", {}).get("path", "") for volume in pod["volumes"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(host)
    return {mount["mountPath"]: host[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("name", ["trainer.yaml", "trainer-two-nodes.yaml"])
def test_job_and_daemon_share_drives_runtime_folder_and_user(name: str, tmp_path: Path) -> None:
    daemon, job = objects("infinityd.yaml"), objects(name)
    of_daemon, of_job = mounts(pod_of(daemon["DaemonSet"])), mounts(pod_of(job["Job"]))
    shared = {path: place for path, place in of_daemon.items() if place}
    assert shared == {"/run/infinity": "/run/infinity-1000", "/nvme0": "/mnt/nvme0", "/nvme1": "/mnt/nvme1"}
    assert shared.items() <= of_job.items()
    users = {
        pod_of(tree)["containers"][0]["securityContext"]["runAsUser"] for tree in (daemon["DaemonSet"], job["Job"])
    }
    assert users == {1000}
    settings = tmp_path / "infinity.toml"
    settings.write_text(job["ConfigMap"]["data"]["infinity.toml"])
    trainer = load_config(settings)
    settings.write_text(daemon["ConfigMap"]["data"]["infinityd.toml"])
    node = daemon_config._SETTINGS.load(settings)
    assert [str(Path(path).parent) for path in trainer.storage.paths] == list(node.drives.paths) == ["/nvme0", "/nvme1"]
    assert trainer.telemetry.runtime_dir == node.stats_files.runtime_dir == "/run/infinity"
    assert trainer.run.resume == "auto"


def test_job_for_two_nodes_has_a_rendezvous_and_time_for_a_checkpoint() -> None:
    """`nodes/test_kubernetes_job.py` runs its command."""
    found = objects("trainer-two-nodes.yaml")
    service, job = found["Service"], found["Job"]
    pod, name = pod_of(job), job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = job["spec"]["template"]["metadata"]["labels"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert service["spec"]["selector"] == apart["labelSelector"]["matchLabels"] == labels
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (job["spec"]["completionMode"], job["spec"]["parallelism"]) == ("Indexed", job["spec"]["completions"])
    (trainer,) = pod["containers"]
    words = trainer["command"][2].split()
    options = {option: value for option, value in pairwise(words) if option.startswith("--")}
    assert options["--nnodes"] == str(job["spec"]["completions"])
    assert options["--nproc-per-node"] == str(trainer["resources"]["limits"]["nvidia.com/gpu"])
    assert options["--rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert words[0] == "exec"  # otherwise, sh would receive SIGTERM and not torchrun
    assert 60 < int(options["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]


def test_pod_monitor_selects_the_pods_of_the_daemon() -> None:
    template = objects("infinityd.yaml")["DaemonSet"]["spec"]["template"]
    monitor = objects("podmonitor.yaml")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert [port["name"] for port in template["spec"]["containers"][0]["ports"]] == [endpoint["port"]]
    assert {"targetLabel": "job", "replacement": "infinity"} in endpoint["relabelings"]


def test_prometheus_finds_the_pods_of_the_daemon(tmp_path: Path) -> None:
    """`promtool` checks the rest of the file, because not every build of it supports Kubernetes."""
    template = objects("infinityd.yaml")["DaemonSet"]["spec"]["template"]
    settings = yaml.safe_load((DEPLOY.parent / "docker/prometheus/kubernetes.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "infinity"
    (discovery,) = job.pop("kubernetes_sd_configs")
    (selector,) = discovery["selectors"]
    assert discovery["role"] == selector["role"] == "pod"
    key, value = selector["label"].split("=")
    assert template["metadata"]["labels"][key] == value
    port, ended, instance = job["relabel_configs"]
    assert port["action"] == "keep"
    assert port["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    assert port["regex"] == template["spec"]["containers"][0]["ports"][0]["name"]
    assert ended["source_labels"] == ["__meta_kubernetes_pod_phase"]
    assert (ended["regex"], ended["action"]) == ("Succeeded|Failed", "drop")
    assert instance["target_label"] == "instance"
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    settings["rule_files"] = []
    (tmp_path / "prometheus.json").write_text(json.dumps(settings))
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.json"], check=True)


def test_seccomp_profile_allows_io_uring_and_resolves_conditions() -> None:
    """The OCI format ignores conditions, so rules for capabilities and other processors must not remain."""
    allow = "SCMP_ACT_ALLOW"
    masked = [{"index": 0, "value": 2114060288, "op": "SCMP_CMP_MASKED_EQ"}]
    architectures = {"SCMP_ARCH_X86_64": ["SCMP_ARCH_X86"], "SCMP_ARCH_AARCH64": ["SCMP_ARCH_ARM"]}
    default = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [{"architecture": name, "subArchitectures": sub} for name, sub in architectures.items()],
        "syscalls": [
            {"names": ["read"], "action": allow, "comment": "", "includes": {}, "excludes": {}},
            {"names": ["ptrace"], "action": allow, "includes": {"minKernel": "4.8"}},
            {"names": ["mount"], "action": allow, "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["clone"], "action": allow, "args": masked,
             "excludes": {"caps": ["CAP_SYS_ADMIN"], "arches": ["s390x"]}},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["here"], "action": allow, "includes": {"arches": ["amd64", "arm64"]}},
            {"names": ["elsewhere"], "action": allow, "includes": {"arches": ["s390x"]}},
        ],
    }  # fmt: skip
    command = [sys.executable, str(DEPLOY / "seccomp.py")]
    profile = json.loads(subprocess.run(command, input=json.dumps(default), capture_output=True, text=True).stdout)
    assert [rule["names"] for rule in profile["syscalls"]] == [
        ["read"], ["ptrace"], ["clone"], ["clone3"], ["here"],
        ["io_uring_setup", "io_uring_enter", "io_uring_register"],
    ]  # fmt: skip
    assert all(set(rule) <= {"names", "action", "errnoRet", "args"} for rule in profile["syscalls"])
    assert profile["syscalls"][2]["args"] == masked
    assert profile["syscalls"][3]["errnoRet"] == 38
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert profile["architectures"][1:] == architectures[profile["architectures"][0]]

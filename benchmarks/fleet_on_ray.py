"""A fleet of six models for three targets on a cluster of which a node is lost, beside the same on one machine.

    python benchmarks/fleet_on_ray.py [--work build/fleet_on_ray] [--undisturbed]

The cluster is Ray's, on this machine: a head, which the command is run on, and a node for each target. Its nodes are
processes, and the types of GPU that they offer are only claimed, as custom resources; each has a cache of its own. What
they share is a bucket of an S3 endpoint on the loopback (moto). While the fleet is on its way, everything that makes up
the node of one target is killed (SIGKILL), and another node that offers the same is added some seconds later.

Every engine, graph and test vector of every run has to be what the local executor makes, byte for byte. Writes
results/fleet_on_ray.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "data" / "cluster"))

import ray_processes  # noqa: E402 - it is beside the tests

from enginesmith.pipeline.artifact import file_digest, files_below  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "fleet_on_ray.json"
TARGETS = ("h100", "l4", "a10g")
LOST = "l4"
_ADDED_AFTER_SECONDS = 5.0
_KINDS = ("variants", "graphs")
NETS = '''"""Small networks of the kinds that people ship, with random weights."""

import torch
from torch import Tensor, nn

IMAGE = torch.zeros(1, 3, 16, 16)


def plain() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 10)).eval(), IMAGE


def separable() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 24, 1), nn.Hardswish(), nn.Conv2d(24, 24, 3, groups=24), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 10)).eval(), IMAGE


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.first(image))
        return (x + self.second(x)).mean((2, 3))


def residual() -> tuple[nn.Module, Tensor]:
    return Residual().eval(), IMAGE


def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).eval(), torch.zeros(1, 64)


def encoder() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.zeros(1, 8, 32)
'''
RECIPE = {
    "precisions": ["fp32", "int8-dynamic"],
    "graph_optimization": ["basic", "all"],
    "batch": [1],
    "shapes": {"batch": "1:1:4"},
    "measure": {"memory": False, "seconds": 0.5},
}


def fleet() -> dict[str, Any]:
    """The fleet file."""
    models = {key: {"model": f"nets.py:{key}"} for key in ("plain", "separable", "residual", "perceptron", "encoder")}
    targets = {name: {"resources": {f"fake_{name}": 1}} for name in TARGETS}
    return {"recipe": RECIPE, "models": {**models, "digits": {}}, "targets": targets}


def command(project: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    """The command line, begun."""
    words = [sys.executable, "-m", "enginesmith.cli", "optimize", "fleet.yaml", "--out", str(out), *more]
    log = out.with_suffix(".log").open("w")
    return subprocess.Popen(words, cwd=project, stdout=log, stderr=log, text=True)


def made(out: Path) -> dict[str, str]:
    """Digests of what was made, by run and file; not of records, which tell when and how long."""
    return {
        f"{run.name}/{kind}/{name}": file_digest(run / kind / name)
        for run in sorted((out / "runs").iterdir())
        for kind in _KINDS
        for name in files_below(run / kind)
        if not name.endswith("manifest.json")
    }


def in_the_middle(out: Path, target: str) -> None:
    """Wait until something is done on a target."""
    while not any(out.glob(f"runs/*@{target}/logs/*.log")):
        time.sleep(0.1)


def summary(out: Path, seconds: float, code: int) -> dict[str, Any]:
    """Sum up the fleet's own record."""
    found = json.loads((out / "fleet.json").read_bytes())
    return {
        "exit_code": code,
        "seconds": round(seconds, 1),
        "entries": len(found["entries"]),
        "winners": sum(entry["status"] == "done" for entry in found["entries"]),
    }


def on_the_cluster(project: Path, work: Path, undisturbed: bool) -> dict[str, Any]:
    """The fleet with the store in a bucket."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "team", "AWS_SECRET_ACCESS_KEY": "secret"}
    s3fs.S3FileSystem().mkdir("engines")
    out = work / "ray"
    try:
        with ray_processes.cluster(ENGINESMITH_CACHE=str(work / "cache-head")) as cluster:
            nodes = {name: cluster.add(f'{{"fake_{name}": 1}}', ENGINESMITH_CACHE=str(work / name)) for name in TARGETS}
            begun = time.monotonic()
            address = ("--executor", "ray", "--ray-address", cluster.address, "--store", "s3://engines/store")
            running = command(project, out, *address)
            if not undisturbed:
                in_the_middle(out, LOST)
                nodes[LOST].kill()
                time.sleep(_ADDED_AFTER_SECONDS)
                cluster.add(f'{{"fake_{LOST}": 1}}', ENGINESMITH_CACHE=str(work / "another"))
            code = running.wait()
            seconds = time.monotonic() - begun
    finally:
        server.stop()
    told = [line for line in out.with_suffix(".log").read_text().splitlines() if "lost" in line or "joined" in line]
    return {**summary(out, seconds, code), "told": told[:8]}


def main() -> None:
    """Both, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/fleet_on_ray"))
    parser.add_argument("--undisturbed", action="store_true")
    chosen = parser.parse_args()
    work = chosen.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    project = work / "project"
    project.mkdir(parents=True)
    (project / "nets.py").write_text(NETS)
    (project / "fleet.yaml").write_text(json.dumps(fleet(), indent=1))
    begun = time.monotonic()
    code = command(project, work / "local", "--store", str(work / "local-store")).wait()
    local = summary(work / "local", time.monotonic() - begun, code)
    found = on_the_cluster(project, work, chosen.undisturbed)
    here, there = made(work / "local"), made(work / "ray")
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    result = {"local": local, "ray": found, "files": len(here), "differing": differing}
    print(json.dumps(result, indent=1))
    if not chosen.undisturbed:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What machines have to agree on before they work on one run: whatever is part of keys but the task itself."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.engines import environment, packages
from enginesmith.pipeline.execution.executor import own_code
from enginesmith.pipeline.system import cpu, cuda, machine, software
from enginesmith.pipeline.system.cpu import vector_units


@dataclass(frozen=True)
class NodeFingerprint:
    """One machine, as far as others have to be like it."""

    python: str
    """Major and minor version."""
    code: str
    """Digest of enginesmith's own."""
    packages: Mapping[str, str]
    """Versions of those that are installed, of the ones that decide what comes out."""
    kind: str = ""
    """A digest of the processor and the GPUs: what was built on one machine runs on others of its kind."""
    machine: str = ""
    """A digest of all that measurements depend on: those of one machine hold for others that share it."""


def own_fingerprint() -> NodeFingerprint:
    """Those of this machine."""
    major, minor, _ = platform.python_version_tuple()
    gpus = [gpu.model_dump() for gpu in cuda.driver().devices]
    kind = json_digest([platform.machine(), cpu.model(), vector_units(), gpus])
    return NodeFingerprint(
        f"{major}.{minor}",
        own_code(),
        software.versions(name for name in packages() if name != "enginesmith"),
        kind,
        machine.fingerprint(environment()),
    )


def mismatches(here: NodeFingerprint, nodes: Mapping[str, NodeFingerprint]) -> list[str]:
    """A line for each difference that would change keys, by the names of the nodes.

    A package that this machine lacks may be on nodes, as TensorRT is on those with a GPU: it is in no key that is made
    here. But nodes have to agree on it.
    """
    found = []
    first: dict[str, tuple[str, str]] = {}
    for node, there in nodes.items():
        if there.python != here.python:
            found.append(f"{node}: Python {there.python}, and here {here.python}")
        if there.code != here.code:
            found.append(
                f"{node}: another version of enginesmith's own code ({there.code[:12]}, here {here.code[:12]})"
            )
        for package, version in sorted(here.packages.items()):
            has = there.packages.get(package)
            if has != version:
                found.append(f"{node}: {f'{package} {has}' if has else f'no {package}'}, and here {version}")
        for package, version in sorted(there.packages.items()):
            other, known = first.setdefault(package, (node, version))
            if package not in here.packages and version != known:
                found.append(f"{node}: {package} {version}, and {known} on {other}")
    return found

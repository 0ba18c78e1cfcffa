"""Name an engine, its artifact and its device as one thing to measure."""

from dataclasses import dataclass

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.system.device import Device


@dataclass(frozen=True)
class Candidate:
    """Name an engine and its artifact on a device, to be measured."""

    id: str
    engine: Engine
    artifact: Artifact
    device: Device

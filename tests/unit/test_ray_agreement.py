"""What nodes have to have in common with the machine that a run is started on."""

from dataclasses import replace

from enginesmith.pipeline.execution.ray.fingerprint import NodeFingerprint, mismatches, own_fingerprint

HERE = NodeFingerprint("3.11", "c0de" * 16, {"torch": "2.13.0", "onnx": "1.19.1"})


def test_machines_that_agree() -> None:
    assert mismatches(HERE, {"north": HERE, "south": replace(HERE, kind="another processor", machine="other")}) == []


def test_each_difference_is_told_with_the_node() -> None:
    north = replace(HERE, python="3.12", packages={"torch": "2.12.0"})
    south = replace(HERE, code="beef" * 16)
    assert mismatches(HERE, {"north": north, "south": south}) == [
        "north: Python 3.12, and here 3.11",
        "north: no onnx, and here 1.19.1",
        "north: torch 2.12.0, and here 2.13.0",
        "south: another version of enginesmith's own code (beefbeefbeef, here c0dec0dec0de)",
    ]


def test_what_is_only_on_nodes_has_to_be_the_same_there() -> None:
    """TensorRT is where the GPUs are; this machine makes no key with it."""
    gpu = {**HERE.packages, "tensorrt": "11.0"}
    nodes = {"cpu": HERE, "north": replace(HERE, packages=gpu), "south": replace(HERE, packages=gpu)}
    assert mismatches(HERE, nodes) == []
    nodes["south"] = replace(HERE, packages={**gpu, "tensorrt": "10.13"})
    assert mismatches(HERE, nodes) == ["south: tensorrt 10.13, and 11.0 on north"]


def test_the_facts_of_this_machine() -> None:
    found = own_fingerprint()
    assert found == own_fingerprint()
    assert found.packages["torch"]
    assert "enginesmith" not in found.packages, "the code itself travels, and its digest is compared"
    assert len(found.code) == len(found.kind) == len(found.machine) == 64

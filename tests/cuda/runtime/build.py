"""Build the CUDA runtime without a device, next to the packages of an environment.

``python build.py OUT`` compiles what is in this folder against the headers of the environment's NVIDIA packages. What a
library exports beyond that is read from the environment's real one (``nm``), and does nothing. ``OUT/env.sh`` then puts
the result under whatever the shell starts. Exit code 3 with one line: what is missing.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_NVIDIA = importlib.util.find_spec("nvidia")
PACKAGES = Path(((_NVIDIA and _NVIDIA.submodule_search_locations) or ["nvidia"])[0])
CUDA, CUDNN = PACKAGES / "cu13", PACKAGES / "cudnn"


class Missing(Exception):
    """Something that the build needs is not on this machine."""


@dataclass(frozen=True)
class Library:
    """One shared library: its soname, our sources, the real one, and what a function returns that only that has."""

    soname: str
    sources: tuple[str, ...]
    real: Path | None = None
    status: int = 0
    versions: bool = True


LIBRARIES = (
    Library("libcuda.so.1", ("driver", "control"), versions=False),
    Library(
        "libcudart.so.13",
        ("state", "devices", "memory", "streams", "events", "launches", "control"),
        CUDA / "lib/libcudart.so.13",
        status=801,  # cudaErrorNotSupported
    ),
    Library("libcublasLt.so.13", ("cublaslt", "product", "control"), CUDA / "lib/libcublasLt.so.13"),
    Library("libcublas.so.13", ("cublas", "product", "control"), CUDA / "lib/libcublas.so.13"),
    Library("libcudnn.so.9", ("cudnn",), CUDNN / "lib/libcudnn.so.9"),
    Library("libnvidia-ml.so.1", ("nvml", "control"), versions=False),
)
"""In the order in which they are preloaded."""
DRIVER_NAMES = ("cuTensorMapEncodeTiled",)
"""What ONNX Runtime's CUDA provider imports of the driver; 801 is CUDA_ERROR_NOT_SUPPORTED."""


def run(*command: str | Path) -> str:
    """Run a tool.

    Raises:
        SystemExit: It failed; what it wrote is shown.
    """
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def include_folders() -> list[Path]:
    """List the folders of the headers; ``crt/`` is in a pip package of its own, or in a toolkit.

    Raises:
        Missing: There are none.
    """
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include", Path("/usr/include")]
    if not (CUDA / "include/cuda_runtime_api.h").exists():
        raise Missing("the headers of CUDA 13 (pip package nvidia-cuda-runtime) are not in this environment")
    folders = [CUDA / "include", CUDNN / "include"]
    if not (CUDA / "include/crt/host_defines.h").exists():
        crt = next((folder for folder in toolkits if (folder / "crt/host_defines.h").exists()), None)
        if crt is None:
            raise Missing("CUDA's crt headers are not here: pip package nvidia-cuda-crt 13, or a toolkit at CUDA_HOME")
        folders.append(crt)
    return folders


def exported(library: Path) -> set[str]:
    """List the functions that a shared library exports."""
    lines = run("nm", "-D", "--defined-only", library).splitlines()
    found = (line.split() for line in lines)
    return {words[2].split("@")[0] for words in found if len(words) == 3 and words[1] in "TtWi"}


def rest_of(library: Library, ours: set[str]) -> str:
    """Write what the real library has and ours has not: functions that do nothing; those that create, give a handle."""
    names = exported(library.real) if library.real else set(DRIVER_NAMES if "driver" in library.sources else ())
    lines = ["#include <stdlib.h>"]
    for name in sorted(names - ours):
        if name.startswith("cudnnCreate"):
            lines.append(f"int {name}(void **handle) {{ *handle = calloc(1, 256); return 0; }}")
        elif name.startswith(("cu", "__cuda")):
            lines.append(f"int {name}(void) {{ return {library.status if library.real else 801}; }}")
    return "\n".join(lines) + "\n"


def build(library: Library, folders: list[Path], out: Path) -> None:
    """Compile our sources, see what they define, add the rest, and link."""
    work = out / "objects" / library.soname
    work.mkdir(parents=True, exist_ok=True)
    objects = []
    for name in library.sources:
        objects.append(work / f"{name}.o")
        system = [word for folder in folders for word in ("-isystem", folder)]
        flags = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden", "-Wno-unused-parameter")
        run("g++", *flags, *system, "-c", HERE / f"{name}.cpp", "-o", objects[-1])
    ours = {line.split()[-1] for line in run("nm", "--defined-only", *objects).splitlines() if " T " in line}
    (work / "rest.c").write_text(rest_of(library, ours))
    node = f"{library.soname} " if library.versions else ""
    (work / "versions.map").write_text(f"{node}{{ global: cu*; __cuda*; nvml*; local: *; }};\n")
    run("gcc", "-O1", "-fPIC", "-c", work / "rest.c", "-o", work / "rest.o")
    link = ("g++", "-shared", f"-Wl,-soname,{library.soname}", f"-Wl,--version-script={work / 'versions.map'}")
    run(*link, *objects, work / "rest.o", "-o", work / library.soname, "-ldl", "-lpthread")
    (work / library.soname).replace(out / library.soname)  # processes that use the old one keep it


def environment(out: Path) -> str:
    """Write the shell lines that put the runtime under a program."""
    preload = " ".join(str(out / library.soname) for library in LIBRARIES)
    lines = (
        f"export ENGINESMITH_STAND_IN={out}",
        f'export LD_LIBRARY_PATH="{out}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
        f'export LD_PRELOAD="{preload}"',
    )
    return "\n".join(lines) + "\n"


def is_current(out: Path) -> bool:
    """Tell whether OUT was built of these sources and packages."""
    made = out / "env.sh"
    if not made.exists() or made.read_text() != environment(out):
        return False
    return all(source.stat().st_mtime < made.stat().st_mtime for source in (*HERE.glob("*"), CUDA / "lib"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    if is_current(out):
        return 0
    try:
        for tool in ("g++", "gcc", "nm"):
            if not shutil.which(tool):
                raise Missing(f"{tool} is not installed")
        folders = include_folders()
    except Missing as missing:
        sys.stderr.write(f"{missing}\n")
        return 3
    out.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        build(library, folders, out)
    (out / "env.sh").write_text(environment(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# The lane without a device, as `make test-cuda` runs it: an environment with CUDA's packages, the runtime, the tests.
#
#   CUDA_VENV        the environment; made where it is not there (a download of 3 GB). An existing one is used as it is.
#   CUDA_PIP_CONFIG  pip's configuration for that download; none by default, so that torch comes with CUDA, from PyPI.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PYTHON:=python3}" "${CUDA_VENV:=.venv-cuda}" "${CUDA_PIP_CONFIG:=/dev/null}"
python=$CUDA_VENV/bin/python

skip() {
    echo "test-cuda: skipped: $*"
    exit 0
}

for tool in g++ gcc nm; do
    command -v "$tool" >/dev/null || skip "$tool is not installed"
done
if [ ! -x "$python" ]; then
    "$PYTHON" -m venv "$CUDA_VENV"
    PIP_CONFIG_FILE=$CUDA_PIP_CONFIG PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' "$python" -m pip install -q \
        --disable-pip-version-check -c constraints.txt -e '.[gpu]' pytest pytest-timeout \
        'nvidia-cuda-crt>=13,<14' 'nvidia-cuda-cccl>=13,<14' || {
        rm -rf "$CUDA_VENV"
        skip "pip could not install the GPU packages (see above)"
    }
fi
cuda=$("$python" -c 'import importlib.util as u, pathlib, runpy
print(runpy.run_path(str(pathlib.Path(u.find_spec("torch").origin).with_name("version.py")))["cuda"])' 2>/dev/null || true)
case $cuda in
13.*) ;;
*) skip "torch in $CUDA_VENV is not built for CUDA 13 (it says: ${cuda:-no torch}); name an index with CUDA_PIP_CONFIG" ;;
esac

mkdir -p build
[ -e build/enginesmith ] || ln -sfn .. build/enginesmith
runtime=$PWD/build/cuda
if ! missing=$("$python" tests/cuda/runtime/build.py "$runtime" 2>&1); then
    case $missing in
    *$'\n'*) echo "$missing" >&2; exit 1 ;;
    *) skip "$missing" ;;
    esac
fi
# shellcheck source=/dev/null
. "$runtime/env.sh"
PYTHONPATH=$PWD/build${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pytest tests/cuda tests/gpu/test_memory.py \
    --deselect tests/gpu/test_memory.py::test_tensorrt_is_counted_to_the_byte "$@"

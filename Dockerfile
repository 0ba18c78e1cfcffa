# enginesmith in a container. Work is in /work; results and downloads are kept in /cache, for later containers.
#   docker build -t enginesmith .                       # for CPUs
#   docker build -t enginesmith:gpu --target gpu .      # for NVIDIA GPUs; run it with --gpus all
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" -v enginesmith:/cache \
#     enginesmith optimize net.py:build --out runs/net
# Build arguments:
#   EXTRAS=hf,timm           extras of pyproject.toml, beside those of the flavor
#   PACKAGES=g++             packages of Debian, separated by spaces; the engine `compiled` needs a C++ compiler on CPUs
#   PIP_EXTRA_INDEX_URL=…    PyTorch's CPU index: on PyPI, torch for Linux comes with CUDA (gigabytes)
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY pyproject.toml setup.py README.md cli.py ./
COPY calibration calibration
COPY models models
COPY pipeline pipeline
RUN pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS base
ARG PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "${PACKAGES}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
# Any user may write here, also one that /etc/passwd does not name; a new volume takes these rights over.
RUN useradd --uid 10001 --home-dir /cache --no-create-home enginesmith && mkdir -m 1777 /work /cache
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    HOME=/cache \
    USER=enginesmith \
    XDG_CACHE_HOME=/cache \
    ENGINESMITH_STORE=/cache/enginesmith \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor
# The dependencies have a layer of their own: this is the project without its code.
WORKDIR /opt/enginesmith
COPY pyproject.toml setup.py constraints.txt ./
RUN touch README.md
ENTRYPOINT ["enginesmith"]
CMD ["--help"]

FROM base AS gpu
ARG EXTRAS=
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The engine `compiled`: Triton compiles the code that starts its kernels when it runs. Python's headers are in the image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt ".[gpu,tensorrt${EXTRAS:+,${EXTRAS}}]"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
WORKDIR /work
USER 10001

FROM base AS cpu
ARG EXTRAS=
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir -c constraints.txt ".[cpu${EXTRAS:+,${EXTRAS}}]"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
WORKDIR /work
USER 10001

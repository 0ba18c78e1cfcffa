# enginesmith in a container.
#   docker build -t enginesmith .                       # the CPU flavour
#   docker build -t enginesmith:gpu --target gpu .      # the GPU flavour; run it with --gpus all
#   docker run --rm -v "$PWD:/work" enginesmith optimize net.py:build --out runs/net
# On PyPI, torch for Linux comes with CUDA. To keep that out of the CPU flavour, name PyTorch's CPU index:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=… -t enginesmith .
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS source
WORKDIR /source
COPY pyproject.toml constraints.txt README.md cli.py ./
COPY calibration calibration
COPY models models
COPY pipeline pipeline
RUN python -m venv /opt/enginesmith

FROM source AS build-cpu
ARG PIP_EXTRA_INDEX_URL
RUN /opt/enginesmith/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[cpu]'

FROM source AS build-gpu
RUN /opt/enginesmith/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[gpu,tensorrt]'

FROM python:${PYTHON} AS base
RUN useradd --create-home --uid 10001 smith && mkdir /work /store && chown smith:smith /work /store
ENV PATH=/opt/enginesmith/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ENGINESMITH_STORE=/store
WORKDIR /work
VOLUME ["/store"]
USER smith
ENTRYPOINT ["enginesmith"]
CMD ["--help"]

FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/enginesmith /opt/enginesmith

FROM base AS cpu
COPY --from=build-cpu /opt/enginesmith /opt/enginesmith

#!/bin/sh
# fetch.sh FOLDER: get what tests/cuda/test_tensorrt.py needs of TensorRT: Python bindings from PyPI, and the public headers.
# Then: TENSORRT_PARTS=FOLDER make test-cuda. Headers of 11.1 serve for 11.4: functions are only added at the end.
set -eu
mkdir -p "$1"
for version in 10.13.3.9.post1 10.16.1.11 11.4.0.106; do
    python3 -m pip download --no-deps --dest "$1" "tensorrt_cu13_bindings==$version"
done
git clone --filter=blob:none --no-checkout https://github.com/NVIDIA/TensorRT "$1/TensorRT"
for pair in 10.13.3:10.13 10.16:10.16 11.1:11.4; do
    mkdir -p "$1/include-${pair#*:}"
    git -C "$1/TensorRT" archive "origin/release/${pair%:*}" include | tar -x -C "$1/include-${pair#*:}" --strip-components 1
done
cp -n "$1/include-10.16/NvOnnxParser.h" "$1/include-10.13/"

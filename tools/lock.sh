#!/usr/bin/env bash
# Writes locks/*.txt anew from pyproject.toml: every package of every install, exact, with the hashes of all its files.
#
# usage: tools/lock.sh [uv option ...]      e.g. tools/lock.sh --upgrade, tools/lock.sh --upgrade-package jax
# Needs uv. Without an option, versions already locked stay as long as pyproject.toml allows them.
#
#   dev.txt      library, server, training, notebooks and tools, on a CPU     (make test)
#   runtime.txt  the library alone, on a CPU                                  (make demo)
#   cuda12.txt, cuda13.txt   the library on an NVIDIA GPU                     (make demo EXTRA=cuda12)
#   aot.txt      the library and a compiler for NVIDIA GPUs, nothing to run on one     (make gate)
#   uv.txt       uv itself, for a machine without a Python that is new enough
#
# dev.txt is resolved first and constrains the others, so that any of them can be installed over another in one
# environment. "Universal" resolution makes one file hold for every Python and processor that pyproject.toml admits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export UV_CUSTOM_COMPILE_COMMAND="tools/lock.sh"

compile() { # OUTPUT INPUT [uv option ...]
    local output=$1 input=$2
    shift 2
    uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
        --output-file "$output" "$input" "$@"
}

compile locks/dev.txt pyproject.toml --group build \
    --extra cpu --extra serve --extra train --extra plots --extra notebooks --extra dev "$@"
compile locks/runtime.txt pyproject.toml --group build --constraints locks/dev.txt --extra cpu "$@"
compile locks/cuda12.txt pyproject.toml --group build --constraints locks/dev.txt --extra cuda12 "$@"
compile locks/cuda13.txt pyproject.toml --group build --constraints locks/dev.txt --extra cuda13 "$@"
compile locks/aot.txt pyproject.toml --group build --constraints locks/cuda13.txt --extra aot "$@"
uv pip compile --quiet --universal --python-version 3.8 --generate-hashes --no-emit-index-url \
    --output-file locks/uv.txt - "$@" <<<"uv"

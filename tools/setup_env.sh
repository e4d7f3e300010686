#!/usr/bin/env bash
# Makes or completes the virtual environment of this checkout; called by the Makefile.
#
# usage: tools/setup_env.sh VENV LOCK       e.g. tools/setup_env.sh .venv locks/dev.txt
#
# Needs one of: a Python >= 3.12 (on PATH or under pyenv), uv, or any python3 with pip, with which it installs uv into
# .cache/ to have uv fetch a Python. $PYTHON names the interpreter to use instead of searching.
# Everything installed is pinned by hash; the checkout itself is installed editable, without its dependencies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1
lock=$2
oldest=3.12 # project.requires-python

fail() {
    echo "set-up: $*" >&2
    exit 1
}

# Wheels in the locks are those of Linux on these processors; elsewhere pip would skip every line without a word.
case "$(uname -s)-$(uname -m)" in
Linux-x86_64 | Linux-aarch64) ;;
*) fail "the locks hold for Linux on x86_64 and aarch64, not for $(uname -s) on $(uname -m)" ;;
esac

# True if $1 runs, is new enough and can make an environment with pip in it (Debian ships Pythons that cannot, and
# pyenv puts a python3.12 on PATH that only prints an error unless that version is selected).
usable() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < tuple(map(int, '$oldest'.split('.'))))" \
        >/dev/null 2>&1
}

# Prints the interpreter to make the environment with, or nothing.
find_python() {
    local candidate version
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= $oldest with venv and pip"
        echo "$PYTHON"
        return
    fi
    for version in 3.12 3.13; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3; do
            usable "$candidate" && { echo "$candidate" && return; }
        done
    done
    for candidate in python3 python; do
        usable "$candidate" && { echo "$candidate" && return; }
    done
    return 0 # prints nothing: there is none
}

# Prints a uv command, installing uv into the checkout if there is none.
find_uv() {
    local candidate
    for candidate in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" .cache/uv/bin/uv; do
        "$candidate" --version >/dev/null 2>&1 && { echo "$candidate" && return; }
    done
    python3 -m pip --version >/dev/null 2>&1 ||
        fail "found no Python >= $oldest, no uv and no python3 with pip: install one of them"
    # --target: neither the system's packages nor the user's are touched, and no rule against touching them applies.
    python3 -m pip install -qq --target .cache/uv --require-hashes --requirement locks/uv.txt >&2
    echo .cache/uv/bin/uv
}

if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    if [[ -n $python ]]; then
        echo "set-up: $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    else
        uv=$(find_uv)
        echo "set-up: no Python >= $oldest here; uv gets one"
        "$uv" venv --quiet --python "$oldest" --seed "$venv" ||
            fail "uv could not get Python $oldest: install one and name it with PYTHON="
    fi
fi
"$venv/bin/python" -c "import sys; sys.exit(sys.version_info < tuple(map(int, '$oldest'.split('.'))))" ||
    fail "$venv holds a Python older than $oldest: remove it or name another folder with VENV="

# --no-compile: bytecode is written as modules are first imported, which for most of them never happens.
# -qq: errors only.
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
echo "set-up: installing $lock"
"${pip[@]}" install -qq --no-compile --require-hashes --requirement "$lock"
"${pip[@]}" install -qq --no-deps --no-build-isolation --editable .

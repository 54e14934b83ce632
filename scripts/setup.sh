#!/bin/sh
# Makes .venv in this checkout hold the package (editable) and its pinned dependencies.
#
#   scripts/setup.sh        what `make demo` needs
#   scripts/setup.sh dev    the test and lint tools as well
#
# PYTHON names the interpreter (default python3). A run that finds nothing changed since the last one
# installs nothing. What is missing on the machine is told in one line before anything is made.
set -eu
cd "$(dirname "$0")/.."

level=${1:-package}
PYTHON=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -n 's/^torch==//p' constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $1"; }
stop() { echo "setup: error: $1" >&2; exit 1; }
pip_install() { .venv/bin/python -m pip install -c constraints.txt "$@"; }
quietly() { "$@" >.venv/pip.log 2>&1; }
loudly_if_it_fails() { quietly "$@" || { cat .venv/pip.log >&2; return 1; }; }

require_compiler() {
    case $(uname -s) in Darwin) default=clang++ ;; *) default=g++ ;; esac
    command -v "${CXX:-$default}" >/dev/null 2>&1 ||
        stop "no C++ compiler: '${CXX:-$default}' not found; install it (Debian, Ubuntu: apt install g++) or name yours, e.g. make test CXX=clang++"
}

require_python() {
    command -v "$PYTHON" >/dev/null 2>&1 ||
        stop "no '$PYTHON' found; install Python 3.11 or newer, or name yours, e.g. make test PYTHON=python3.12"
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        stop "'$PYTHON' does not start; name a Python 3.11 or newer, e.g. make test PYTHON=python3.12"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "'$PYTHON' is Python $version, 3.11 or newer is needed; name one, e.g. make test PYTHON=python3.12"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        stop "'$PYTHON' cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python$version-venv)"
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        stop "'$PYTHON' has no Python.h, which compiled code includes; install it (Debian, Ubuntu: apt install python$version-dev)"
}

has_gpu() {
    [ -e /dev/kfd ] || ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1
}

# A venv of another Python, or one that an interrupted run left without pip, is made anew.
make_venv() {
    found=$(.venv/bin/python -I -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || found=none
    [ "$found" = "$version" ] && return
    say "making .venv with Python $version"
    "$PYTHON" -m venv --clear .venv || stop "making .venv failed, see above; is there room on this disk?"
}

# Without a GPU the CPU build is a tenth of the download. It is asked for where pip is configured to look,
# then at PyTorch's own index; a torch of the right release that is already in .venv stays.
install_torch() {
    .venv/bin/python -I - "$torch" <<'PY' && return
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version("torch").partition("+")[0] != sys.argv[1])
except PackageNotFoundError:
    sys.exit(1)
PY
    if ! has_gpu && [ "$(uname -s)" = Linux ]; then
        say "no GPU found: installing the CPU build of torch $torch"
        quietly pip_install "torch==$torch+cpu" && return
        say "not where pip looks; asking PyTorch's own index"
        quietly pip_install --no-deps --index-url "$cpu_index" --retries 1 --timeout 15 "torch==$torch+cpu" && return
        say "no CPU build to be had; taking the default build, a larger download"
    else
        say "installing torch $torch"
    fi
    pip_install "torch==$torch" ||
        stop "pip found no torch $torch for Python $version, see above; is the network up, is this Python too new?"
}

install() {
    require_python
    make_venv
    rm -f .venv/ready-*
    loudly_if_it_fails pip_install --upgrade 'pip>=25.1' setuptools ||
        stop "pip cannot install, see above; is the network up?"
    install_torch
    set -- --no-build-isolation -e . numpy # torch's compiler warns where there is no numpy
    if [ "$level" = dev ]; then
        set -- "$@" --group dev
        say "installing the package with its test and lint tools"
    else
        say "installing the package"
    fi
    loudly_if_it_fails pip_install "$@" || stop "installing the package failed, see above"
}

require_compiler
key=$({ pwd; command -v "$PYTHON" || true; cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum)
for stamp in ".venv/ready-$level" .venv/ready-dev; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && .venv/bin/python -I -c 'import pip' 2>/dev/null; then
        exit 0
    fi
done
install
echo "$key" >".venv/ready-$level"
say "ready"

#!/bin/sh
# install_lock.sh cpu|cuda: installs the lock that lies beside this file into the conda or virtual environment $CONDA_PREFIX.
lock=$(dirname "$0")/$1.txt
install() { uv pip install --quiet --python "$CONDA_PREFIX/bin/python" --no-deps -r "$lock" "$@"; }
# As `make env` does. PyTorch's CPU build is where uv looks (UV_FIND_LINKS), or else in PyTorch's own index.
install || { [ "$1" = cpu ] && install --torch-backend cpu; }

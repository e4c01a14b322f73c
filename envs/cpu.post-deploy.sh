# Run by Snakemake in the new environment; AERIE_ENVS is the folder of the locks, which workflow/rules/common.smk names.
install() { uv pip install --quiet --python "$CONDA_PREFIX/bin/python" --no-deps -r "$AERIE_ENVS/cpu.txt" "$@"; }
# As `make env` does: PyTorch's CPU build from where uv looks (UV_FIND_LINKS), else from PyTorch's own index.
install || install --torch-backend cpu

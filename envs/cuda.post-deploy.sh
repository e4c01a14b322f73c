# Run by Snakemake in the new environment; AERIE_ENVS is the folder of the locks, which workflow/rules/common.smk names.
uv pip install --quiet --python "$CONDA_PREFIX/bin/python" --no-deps -r "$AERIE_ENVS/cuda.txt"

# Run by Snakemake in the new environment; the Snakefile puts this folder on the PATH.
install_lock.sh cpu

#!/bin/sh
# Deletes Jobs and their pods when Snakemake is interrupted.
exec kubectl delete job --ignore-not-found --wait=false "$@"

#!/bin/sh
# What has become of a Job, in Snakemake's words. One that is gone has failed; a cluster that does not answer says nothing of it.
found=$(kubectl get job "$1" --ignore-not-found -o 'jsonpath={.metadata.name} {.status.succeeded} {.status.failed}') || { echo running; exit; }
case "$found" in
    "") echo failed ;;
    *" 1 "*) echo success ;;
    *" "[1-9]*) echo failed ;;
    *) echo running ;;
esac

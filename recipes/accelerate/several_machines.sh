#!/bin/bash
# HEAD=10.0.0.1 NODES=2 NODE=0 recipes/accelerate/several_machines.sh ddp_8gpu RECIPE [key=value ...]
#
# Run on every machine, with its own NODE: 0, 1, … HEAD: address of machine 0, which the others can reach.
# The first argument is a config of this folder. The machines need one file system for the output and DRAFTSMITH_CACHE.
# Optional: PROCESSES on each machine (8), PORT of the rendezvous on HEAD (29500).

set -eu
config="$(dirname "$0")/$1.yaml"
shift
exec accelerate launch --config_file "$config" --num_machines "$NODES" --machine_rank "$NODE" \
    --num_processes "$((NODES * ${PROCESSES:-8}))" --main_process_ip "$HEAD" --main_process_port "${PORT:-29500}" \
    --rdzv_backend c10d --deepspeed_multinode_launcher standard \
    -m draftsmith.train "$@"

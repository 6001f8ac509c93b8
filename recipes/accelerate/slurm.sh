#!/bin/bash
# sbatch recipes/accelerate/slurm.sh ddp_8gpu RECIPE [key=value ...]
#
# Submit from the folder that contains recipes/. Two machines of 8 GPUs; SIGTERM two minutes before the end of the job
# makes the run write a checkpoint, and the same line continues from it.
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append

set -eu
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export HEAD NODES="$SLURM_NNODES"
# shellcheck disable=SC2016  (each task reads its own number)
srun bash -c 'NODE=$SLURM_NODEID exec bash recipes/accelerate/several_machines.sh "$@"' several_machines "$@"

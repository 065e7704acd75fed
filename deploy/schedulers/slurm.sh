#!/bin/bash
# tba on the nodes of a Slurm job: the first one runs what the configuration names (buffer, trainer, searchers), the
# others search. Submit it in the directory of tba.toml:
#
#     sbatch --nodes=4 --gpus-per-node=8 deploy/schedulers/slurm.sh
#
# All nodes need the same paths for this directory, the environment, run.dir and the models. The database needs a file
# system with working locks and mmap: if run.dir is on one without, set buffer.database to a disk of the first node, and
# copy it away after the job.
#
# Run: a job of two nodes of Slurm 22.05 on one machine, on CPUs, with the demo of examples/arithmetic, until its end
# and with `scancel --signal=TERM` and a second job that resumed it. Not run: GPUs, several machines.
#SBATCH --job-name=tba
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
# To the tasks, ten minutes before the end: the trainer saves a checkpoint, searchers deliver.
#SBATCH --signal=TERM@600
#SBATCH --open-mode=append
set -euo pipefail
export TBA=${TBA:-$PWD/.venv/bin/tba} TBA_CONFIG=${TBA_CONFIG:-$PWD/tba.toml} SEARCH=${SEARCH:---gpus all}
export TBA_RUN__DIR=${TBA_RUN__DIR:-$PWD/runs/slurm} TBA_SECURITY__KEYS=$PWD/keys FIRST
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TBA_BUFFER__ADDRESS=tcp://$FIRST:5757 TBA_TRAIN__SERVE_SNAPSHOTS=tcp://$FIRST:5758
# One key pair for the whole job, which only its user can read.
[ -e keys/node.key ] || "$TBA" keys new job --role trainer --role searcher --role importer --role monitor > /dev/null

role() {
    if [ "$SLURM_PROCID" -gt 0 ]; then
        exec "$TBA" search $SEARCH
    elif [ -e "$TBA_RUN__DIR/buffer.sqlite" ]; then
        exec "$TBA" run --resume
    else
        exec "$TBA" run
    fi
}
export -f role
# A node that is lost must not end the others.
exec srun --kill-on-bad-exit=0 --wait=0 bash -c role

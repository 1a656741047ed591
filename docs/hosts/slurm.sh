#!/bin/bash
# Train on 4 hosts of 8 GPUs each: sbatch docs/hosts/slurm.sh
#SBATCH --job-name=fedpax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# One process per GPU. SIGTERM comes 300 s before the time limit: the run saves and stops with
# status 143, and the job goes back into the queue, where it resumes.
set -u

EXPERIMENT=${EXPERIMENT:-diloco_text}
FOLDER=${FOLDER:-$HOME/runs/$EXPERIMENT}     # on a file system that all hosts share

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}   # since Slurm 22.05, srun needs it
# If a task fails, the others end by themselves. Slurm must not end them: that is status 143, too.
srun --kill-on-bad-exit=0 --label \
  fedpax train --multihost --exp="$EXPERIMENT" --job_log_dir="$FOLDER" "$@"
status=$?
if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

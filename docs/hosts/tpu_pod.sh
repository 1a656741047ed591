#!/bin/bash
# Train on all hosts of a Cloud TPU: TPU=my-v5e-256 ZONE=us-west4-a bash docs/hosts/tpu_pod.sh
set -eu

: "${TPU:?set TPU to the name of the TPU VM}" "${ZONE:?set ZONE to its zone}"
EXPERIMENT=${EXPERIMENT:-pretrain_text}
FOLDER=${FOLDER:-/mnt/runs/$EXPERIMENT}      # on a file system that all hosts mount

# The hosts find each other: JAX asks the TPU's metadata.
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="fedpax train --multihost --exp=$EXPERIMENT --job_log_dir=$FOLDER $*"

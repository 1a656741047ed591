#!/bin/bash
# Train on hosts that ssh reaches: HOSTS="10.0.0.1 10.0.0.2" bash docs/hosts/ssh.sh
set -eu

: "${HOSTS:?set HOSTS to the addresses of the hosts, the first for process 0}"
EXPERIMENT=${EXPERIMENT:-diloco_text}
FOLDER=${FOLDER:-/shared/runs/$EXPERIMENT}   # on a file system that all hosts share
PORT=${PORT:-8476}

read -r -a hosts <<< "$HOSTS"
processes=()
for number in "${!hosts[@]}"; do
  # -tt: a process ends with its connection.
  ssh -tt "${hosts[$number]}" \
    JAX_COORDINATOR_ADDRESS="${hosts[0]}:$PORT" \
    JAX_NUM_PROCESSES="${#hosts[@]}" \
    JAX_PROCESS_ID="$number" \
    fedpax train --multihost --exp="$EXPERIMENT" --job_log_dir="$FOLDER" "$@" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do
  wait "$process" || status=$?
done
exit "$status"

#!/bin/sh
# Start this host's ranks of a run over several hosts. Run the script on each host, with that host's ADDRESS:
#
#   HOSTS=1:2 RANKS=8 HEAD=10.0.0.1 ADDRESS=10.0.0.1 examples/launch/host.sh examples/torchrun_template.py
#   HOSTS=1:2 RANKS=8 HEAD=10.0.0.1 ADDRESS=10.0.0.2 examples/launch/host.sh examples/torchrun_template.py
#
# HOSTS    number of hosts, or MIN:MAX; within these limits the run continues when a host is lost or added
# RANKS    number of ranks on this host
# HEAD     address of the host that runs the rendezvous; the run ends if this host is lost
# ADDRESS  address of this host for the other hosts
# DEVICE   network interface of ADDRESS, if the host has several
set -eu
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # gives each attempt a new store
if [ -n "${DEVICE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$DEVICE" NCCL_SOCKET_IFNAME="$DEVICE"
fi
is_host=$([ "$ADDRESS" = "$HEAD" ] && echo 1 || echo 0)
exec torchrun --nnodes "$HOSTS" --nproc-per-node "$RANKS" --max-restarts 10 --local-addr "$ADDRESS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" --rdzv-id "${RUN:-shardlite}" \
    --rdzv-conf "is_host=$is_host,last_call_timeout=${LAST_CALL:-30}" "$@"

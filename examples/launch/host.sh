#!/bin/sh
# Start this host's ranks of a run over several hosts. Start it on each host, with the same arguments but for the address:
#
#   HOSTS=1:2 RANKS=8 HEAD=10.0.0.1 ADDRESS=10.0.0.1 examples/launch/host.sh examples/torchrun_template.py
#   HOSTS=1:2 RANKS=8 HEAD=10.0.0.1 ADDRESS=10.0.0.2 examples/launch/host.sh examples/torchrun_template.py
#
# HOSTS    how many hosts, or at least and at most; a run goes on with fewer when one is lost, and with more when one comes
# RANKS    ranks of this host
# HEAD     address of the host that keeps the rendezvous: the run ends with it
# ADDRESS  address of this host, as the others see it
# DEVICE   network interface of that address, where the host has several
set -eu
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a store of its own for each attempt
if [ -n "${DEVICE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$DEVICE" NCCL_SOCKET_IFNAME="$DEVICE"
fi
is_host=$([ "$ADDRESS" = "$HEAD" ] && echo 1 || echo 0)
exec torchrun --nnodes "$HOSTS" --nproc-per-node "$RANKS" --max-restarts 10 --local-addr "$ADDRESS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" --rdzv-id "${RUN:-shardlite}" \
    --rdzv-conf "is_host=$is_host,last_call_timeout=${LAST_CALL:-30}" "$@"

#!/usr/bin/env bash
# Runs an MPI program on two "hosts" of this machine: two network namespaces, joined by a virtual cable. Ranks of different
# hosts talk by TCP, those of one host as well.
#
#     .ci/two-hosts.sh [-n RANKS] [--rate RATE] [--timeout SECONDS] -- PROGRAM ARGUMENTS...
#
# RATE limits the cable in each direction, in words of tc such as 1gbit; without it, it is as fast as the machine.
# Needs root, iproute2 and Open MPI. Exit code 77: namespaces are not permitted here, or tc cannot limit the cable.

set -euo pipefail

ranks=2 rate='' seconds=120
while (($#)); do
    case $1 in
        -n) ranks=$2; shift 2 ;;
        --rate) rate=$2; shift 2 ;;
        --timeout) seconds=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "two-hosts.sh: unknown option $1" >&2; exit 2 ;;
    esac
done
(($#)) || { echo "two-hosts.sh: no program" >&2; exit 2; }

source "$(dirname "${BASH_SOURCE[0]}")/apt.sh"
need ip iproute2 >&2

# The names of devices have at most 15 characters.
one=one$$ two=two$$
agent=$(mktemp)
cleanup() {
    ip netns delete "$one" 2>/dev/null || true
    ip netns delete "$two" 2>/dev/null || true
    rm -f "$agent"
}
trap cleanup EXIT
{ ip netns add "$one" && ip netns add "$two"; } 2>/dev/null || exit 77
ip link add "$one" netns "$one" type veth peer name "$two" netns "$two" 2>/dev/null || exit 77

host() { # NAMESPACE ADDRESS
    ip -n "$1" address add "$2/24" dev "$1"
    ip -n "$1" link set "$1" up
    ip -n "$1" link set lo up
}
host "$one" 10.91.0.1
host "$two" 10.91.0.2
if [[ -n $rate ]]; then
    for end in "$one" "$two"; do
        # A bucket of tokens is refilled with each tick of the kernel's clock, so it must hold what a tick lets through.
        tc -n "$end" qdisc add dev "$end" root tbf rate "$rate" burst 1mb latency 100ms || exit 77
    done
fi

# What mpirun calls instead of ssh: HOST COMMAND...
cat >"$agent" <<AGENT
#!/bin/sh
host=\$1
shift
[ "\$host" = 10.91.0.2 ] && exec ip netns exec $two sh -c "\$*"
exec ip netns exec $one sh -c "\$*"
AGENT
chmod +x "$agent"

half=$(((ranks + 1) / 2))
timeout "$seconds" ip netns exec "$one" mpirun --allow-run-as-root --oversubscribe -n "$ranks" \
    --host "10.91.0.1:$half,10.91.0.2:$((ranks - half))" --mca plm_rsh_agent "$agent" --mca btl tcp,self \
    --mca btl_tcp_if_include 10.91.0.0/24 --mca oob_tcp_if_include 10.91.0.0/24 "$@"

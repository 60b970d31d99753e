#!/usr/bin/env bash
# Start a one-node SLURM for tests, inside a container: no cgroups, no systemd. Needs root and
# Debian's packages; does nothing when a SLURM is running. Exit 0: `srun` works; 77: it cannot be
# started here, with the reason.
set -euo pipefail

config=/etc/slurm/slurm.conf
mark="# written by tests/slurm/start_slurm.sh"
state=/var/tmp/areal-debug-slurm

answers() { command -v sinfo >/dev/null && timeout 10 sinfo --noheader --format=%t 2>/dev/null | grep -Eq '^(idle|mix|alloc)$'; }
refuse() { echo "no SLURM: $1" >&2; exit 77; }

answers && exit 0
[ "$(id -u)" = 0 ] || refuse "starting one needs root"
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    command -v apt-get >/dev/null || refuse "this is no Debian"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } >/dev/null 2>&1 \
        || refuse "apt-get cannot install slurm-wlm and munge"
fi
[ ! -e "$config" ] || head -n1 "$config" | grep -qF "$mark" || refuse "$config is somebody else's, and that SLURM is down"

host=$(hostname -s)
mkdir -p "$state/controller" "$state/node" /etc/slurm /run/munge /var/log/munge /var/lib/munge
cat >"$config" <<CONFIG
$mark
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/node
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8 State=UP
CONFIG

if ! munge -n >/dev/null 2>&1; then
    [ -s /etc/munge/munge.key ] || head -c 1024 /dev/urandom >/etc/munge/munge.key
    chown -R munge:munge /etc/munge /run/munge /var/log/munge /var/lib/munge
    chmod 0400 /etc/munge/munge.key
    chmod 0755 /run/munge
    setpriv --reuid munge --regid munge --clear-groups munged --force
fi
slurmctld
slurmd -N "$host"
for _ in $(seq 60); do
    answers && exit 0
    sleep 0.5
done
refuse "the daemons started and the node is not idle; see $state/*.log"

#!/bin/bash
# A Ceph cluster on loopback for tests: one monitor, three storage daemons, cephx, no systemd.
#
#   cluster.sh up DIR PORT   makes it in DIR, with a pool `rbd`; the monitor listens at 127.0.0.1:PORT
#   cluster.sh down DIR      ends all of its daemons
#   cluster.sh kill DIR N    kills storage daemon N (SIGKILL)
#   cluster.sh start DIR N   starts it again
#
# DIR/ceph.conf is the config for clients. DIR/keyring has client.admin, and client.reader, which
# may only read. Needs ceph-mon, ceph-osd and ceph-common; ends only processes of its own.
set -euo pipefail
dir=$2 osds=3
export CEPH_CONF=$dir/ceph.conf

fail() { echo "cluster.sh: $*" >&2; exit 1; }

# The process of a daemon, if it runs: its number might be another process's by now.
process_of() {
    local pid
    pid=$(cat "$dir/$1.pid" 2>/dev/null) || return 1
    tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -- "$dir/ceph.conf" && echo "$pid"
}

# Sends a signal to a daemon, and waits until it has ended.
end() {
    local pid
    pid=$(process_of "$1") || return 0
    kill "-$2" "$pid" 2>/dev/null || return 0
    timeout 20 tail --pid="$pid" -f /dev/null || kill -KILL "$pid"
}

# Tries a command again for a while.
until_done() {
    local seconds=$1 tries
    shift
    for ((tries = seconds * 5; tries > 0; tries--)); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    fail "not done after $seconds s: $*; see $dir/*.log"
}

all_osds_up() { ceph osd stat --format json | grep -q "\"num_up_osds\":$osds\b"; }

start_osd() { ceph-osd -c "$CEPH_CONF" -i "$1" >>"$dir/osd.$1.out" 2>&1; }

up() {
    local port=$1 fsid id
    fsid=$(cat /proc/sys/kernel/random/uuid)
    mkdir -p "$dir/mon.a"
    cat >"$CEPH_CONF" <<END
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$port/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = $dir/\$cluster.\$name.keyring,$dir/keyring
run dir = $dir
crash dir = $dir
mon data = $dir/mon.\$id
osd data = $dir/osd.\$id
osd objectstore = bluestore
osd crush chooseleaf type = 0
osd pool default size = 3
osd pool default min size = 2
osd pool default pg autoscale mode = off
osd heartbeat grace = 6
osd heartbeat interval = 2
osd pool default read lease ratio = 0.8
mon osd min down reporters = 1
mon osd reporter subtree level = osd
mon allow pool delete = true
mon data avail crit = 1
mon data avail warn = 2
bluestore block size = $((4 << 30))
bluestore cache autotune = false
bluestore cache size = $((64 << 20))
osd max pg log entries = 500
END
    local section
    for section in mon osd; do
        printf '%s\n' "[$section]" "pid file = $dir/\$name.pid" "log file = $dir/\$name.log" \
            "admin socket = $dir/\$name.asok"
    done >>"$CEPH_CONF"
    local all=(--cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *')
    ceph-authtool >/dev/null --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool >/dev/null "$dir/keyring" --gen-key -n client.admin "${all[@]}"
    ceph-authtool >/dev/null "$dir/keyring" --gen-key -n client.reader \
        --cap mon 'profile rbd' --cap osd 'profile rbd-read-only'
    for ((id = 0; id < osds; id++)); do
        ceph-authtool >/dev/null "$dir/keyring" --gen-key -n "osd.$id" --cap mon 'allow profile osd' --cap osd 'allow *'
    done
    monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$port]" "$dir/monmap" >/dev/null
    ceph-mon -c "$CEPH_CONF" -i a --mkfs --monmap "$dir/monmap" --keyring "$dir/keyring"
    ceph-mon -c "$CEPH_CONF" -i a
    # One process for all commands, because each start of the program takes half a second.
    for ((id = 0; id < osds; id++)); do
        local uuid
        uuid=$(cat /proc/sys/kernel/random/uuid)
        echo "$uuid" >"$dir/osd.$id.uuid"
        echo "osd new $uuid $id"
    done >"$dir/commands"
    until_done 30 ceph --connect-timeout 10 mon stat
    ceph <"$dir/commands" >/dev/null
    for ((id = 0; id < osds; id++)); do
        mkdir "$dir/osd.$id"
        ceph-osd -c "$CEPH_CONF" -i "$id" --mkfs --osd-uuid "$(cat "$dir/osd.$id.uuid")" 2>>"$dir/osd.$id.out" &
    done
    wait
    for ((id = 0; id < osds; id++)); do start_osd "$id" & done
    wait
    until_done 60 all_osds_up
    ceph osd pool create rbd 16 16 >/dev/null 2>&1
    timeout 60 rbd pool init rbd
}

down() {
    local daemon
    for daemon in osd.0 osd.1 osd.2 mon.a; do end "$daemon" TERM; done
}

case $1 in
up) up "$3" ;;
down) down ;;
kill) end "osd.$3" KILL ;;
start) start_osd "$3" ;;
*) sed -n '2,/^set/{/^set/d;p}' "$0"; exit 2 ;;
esac

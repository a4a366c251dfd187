# NVMe/RDMA over siw, Linux's software iWARP: the kernel's host with several paths to one namespace of `blockmux serve`
# (native multipath), over RDMA only, and over RDMA and TCP.
. /lib.sh
. /nvme.inc
. /siw.inc
modprobe nvme-core multipath=Y
modprobe -a nvme_rdma nvme-tcp

serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=192m'
    [[nvme_subsystem]]
    nqn = '$NQN'
    namespaces = { 1 = 'disk' }
    [[nvme_subsystem.ana_group]]
    ANAGRPID = 1
    namespaces = [1]
    states = {}
END"
  serve "--config blockmux.toml --control unix:control --nvme-tcp $HOST:3260 --nvme-tcp $HOST:3261"
}
# add_path TRANSPORT ADDRESS
add_path() {
  nvme connect -t "$1" -a "$2" -s 3260 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=1 \
    --keep-alive-tmo=5 --reconnect-delay=2 --ctrl-loss-tmo=600
}
# state_of ADDRESS: prints the state of the controller with this address.
state_of() { cat "$(dirname "$(grep -l "traddr=$1," /sys/class/nvme/nvme*/address)")/state"; }
has_state() { [ "$(state_of "$1")" = "$2" ]; }
# has_paths COUNT: succeeds if the namespace has COUNT live paths.
has_paths() { [ "$(ls -d /sys/class/nvme/nvme*/nvme*c*n* | wc -l)" = "$1" ]; }
ctl() { host run "blockmux ctl unix:control $*"; }
# has_ana_state ADDRESS STATE: succeeds if the kernel has this ANA state for the path to namespace 1 by this address.
has_ana_state() {
  path=$(dirname "$(grep -l "traddr=$1," /sys/class/nvme/nvme*/address)")
  grep -x "$2" "$path"/nvme*c*n1/ana_state
}
serve_disk

check two_paths_over_rdma_lead_to_one_namespace
add_path rdma $target
add_path rdma $other_target
within 30 has_paths 2
disk=/dev/$(ls /sys/block | grep -x 'nvme[0-9]*n1')
test -b "$disk"
verified_io "$disk" --size=4m
no_kernel_warnings

check io_follows_ana_states_that_change_under_it
within 30 has_ana_state $target optimized
begin_io "$disk"
sees_writes "$disk"
ctl ana $NQN 1 inaccessible --at "$HOST:3260"
within 30 has_ana_state $target inaccessible
sees_writes "$disk"
ctl ana $NQN 1 optimized --at "$HOST:3260"
within 30 has_ana_state $target optimized
ctl ana $NQN 1 inaccessible --at "$HOST:3261"
within 30 has_ana_state $other_target inaccessible
sees_writes "$disk"
ctl ana $NQN 1 optimized --at "$HOST:3261"
within 30 has_ana_state $other_target optimized
end_io

check a_namespace_that_is_attached_is_seen_and_used_until_it_is_detached
ctl add two=mem:32m
ctl attach two $NQN 2
within 30 test -b "${disk%1}2"
verified_io "${disk%1}2" --size=4m
ctl detach --force $NQN 2
is_gone() { ! test -b "${disk%1}2"; }
within 30 is_gone
ctl remove two
verified_io "$disk" --size=4m
no_kernel_warnings 'nvme.*: rescanning|nvme'

check io_continues_on_the_other_path_when_one_is_lost
begin_io "$disk"
sees_writes "$disk"
lose_path $other_target
within 60 has_state $other_target connecting
sees_writes "$disk"
restore_path $other_target
within 60 has_state $other_target live
lose_path $target
within 60 has_state $target connecting
sees_writes "$disk"
restore_path $target
within 60 has_state $target live
sees_writes "$disk"
end_io
no_kernel_warnings .     # Linux logs every lost connection

check io_continues_over_tcp_when_every_path_over_rdma_is_lost
add_path tcp "$HOST"
within 30 has_paths 3
begin_io "$disk"
sees_writes "$disk"
lose_path $target
lose_path $other_target
within 60 has_state $target connecting
within 60 has_state $other_target connecting
sees_writes "$disk"
restore_path $target
restore_path $other_target
within 60 has_state $target live
within 60 has_state $other_target live
sees_writes "$disk"
end_io
no_kernel_warnings .

check io_continues_over_rdma_when_the_path_over_tcp_is_removed
begin_io "$disk"
sees_writes "$disk"
disconnect "$(basename "$(dirname "$(grep -l "traddr=$HOST," /sys/class/nvme/nvme*/address)")")"
within 30 has_paths 2
sees_writes "$disk"
end_io
no_kernel_warnings .

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
host kill target
serve_disk
within 60 has_state $target live
within 60 has_state $other_target live
sees_writes "$disk"
end_io
no_kernel_warnings .
nvme disconnect -n $NQN
host stop target

# NVMe/RDMA over siw, Linux's software iWARP: the kernel's host, with nvme-cli, against `blockmux serve`.
. /lib.sh
. /nvme.inc
. /siw.inc
modprobe nvme-core multipath=N
modprobe nvme_rdma

own=$(nvme gen-dhchap-key --hmac=1 --nqn="$(name_of 1)")
targets=$(nvme gen-dhchap-key --hmac=3 --key-length=64 --nqn=nqn.2026-11.test:guarded)
wrong=$(nvme gen-dhchap-key --hmac=1 --nqn="$(name_of 1)")
host run "umask 77
  echo '$own' >own
  echo '$targets' >targets"

# serve_disk: serves a file, so that its data survives a killed target.
serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=384m'
    protocols = ['nvme_tcp', '$NQN']
    [[volume]]
    name = 'other'
    spec = 'mem:32m'
    [[nvme_subsystem]]
    nqn = '$NQN'
    namespaces = { 1 = 'disk' }
    [[nvme_subsystem]]
    nqn = 'nqn.2026-11.test:private'
    namespaces = { 1 = 'disk' }
    hosts = ['$(name_of 3)']
    [[nvme_subsystem]]
    nqn = 'nqn.2026-11.test:guarded'
    namespaces = { 1 = 'other' }
    [[nvme_subsystem.host]]
    hostnqn = '$(name_of 1)'
    dhchap_secret_file = 'own'
    dhchap_ctrl_secret_file = 'targets'
END"
  serve "--config blockmux.toml --nvme-tcp $HOST:3260 --nvme-tcp $HOST:3261 --control unix:control"
}
# over_rdma COMMAND HOST [OPTIONS]: runs nvme-cli's COMMAND as HOST with the address $at.
at=$target
over_rdma() {
  command=$1 nth=$2
  shift 2
  nvme "$command" -t rdma -a $at -s 3260 --hostnqn="$(name_of "$nth")" --hostid="$(uuid_of "$nth")" "$@"
}
serve_disk

check a_host_that_is_not_allowed_is_refused
fails over_rdma connect 1 -n nqn.2026-11.test:private
no_kernel_warnings 'Connect for subsystem|Connect Invalid|failed to connect|nvme nvme'

check discovery_names_the_subsystem_with_its_transport
over_rdma discover 1 >found
grep 'trtype: *rdma' found
grep "subnqn: *$NQN" found
fails grep private found

check both_sides_authenticate
guarded=nqn.2026-11.test:guarded
fails over_rdma connect 1 -n $guarded
fails over_rdma connect 1 -n $guarded --dhchap-secret="$wrong"
fails over_rdma connect 1 -n $guarded --dhchap-secret="$own" --dhchap-ctrl-secret="$wrong"
no_kernel_warnings .
over_rdma connect 1 -n $guarded --dhchap-secret="$own" --dhchap-ctrl-secret="$targets" --nr-io-queues=1
find_controller 1
verified_io "$(disk_of $controller 1)" --size=4m
disconnect $controller

# After blktests nvme/045, as in nvme-auth.sh.
check a_connected_host_authenticates_again_with_secrets_that_were_replaced
over_rdma connect 1 -n $guarded --dhchap-secret="$own" --dhchap-ctrl-secret="$targets" --nr-io-queues=2
find_controller 1
keys=/sys/class/nvme/$controller
within 60 authenticated 1 sha512 ffdhe2048
host run "echo '$wrong' >own; blockmux ctl control read-keys $guarded"
echo "$wrong" >"$keys/dhchap_secret"
within 60 authenticated 2 sha512 ffdhe2048
renewed=$(nvme gen-dhchap-key --hmac=1 --nqn=$guarded)
host run "echo '$renewed' >targets; blockmux ctl control read-keys $guarded"
echo "$renewed" >"$keys/dhchap_ctrl_secret"
within 60 authenticated 3 sha512 ffdhe2048
verified_io "$(disk_of $controller 1)" --size=4m
disconnect $controller

check a_host_connects_with_several_queues
over_rdma connect 1 -n $NQN --nr-io-queues=2 --keep-alive-tmo=5
find_controller 1
test "$(cat /sys/class/nvme/$controller/queue_count)" = 3
test "$(cat /sys/class/nvme/$controller/transport)" = rdma
disk=$(disk_of $controller 1)
test "$(cat "/sys/block/${disk#/dev/}/size")" = 786432

check an_xfs_file_system_keeps_its_files
file_system xfs "$disk"

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check blocks_are_compared_copied_zeroed_and_flushed
dd if=/dev/urandom of=random bs=4k count=2
dd if=/dev/zero of=zeroes bs=4k count=2
nvme write "$disk" -s 64 -c 15 -z 8192 -d random
nvme compare "$disk" -s 64 -c 15 -z 8192 -d random
fails nvme compare "$disk" -s 64 -c 15 -z 8192 -d zeroes
nvme copy "$disk" --sdlba=1024 --slbs=64,72 --blocks=7,7 --format=0
nvme compare "$disk" -s 1024 -c 15 -z 8192 -d random
nvme write-zeroes "$disk" -s 1024 -c 15
nvme read "$disk" -s 1024 -c 15 -z 8192 -d back
cmp back zeroes
nvme flush "$disk" -n 1

check a_reservation_is_taken_and_released
nvme resv-register "$disk" --nrkey=7 --rrega=0
nvme resv-acquire "$disk" --crkey=7 --rtype=1 --racqa=0
nvme resv-report "$disk" -e | grep 'rtype *: 1'
nvme resv-release "$disk" --crkey=7 --rtype=1 --rrela=0

check two_hosts_have_their_own_reservations
first=$controller
# Otherwise nvme-cli treats it as the same host.
at=$other_target
over_rdma connect 2 -n $NQN --nr-io-queues=1
at=$target
find_controller 2
second=$controller
controller=$first
other=$(disk_of $second 1)
can_write() { dd if=/dev/zero of="$1" bs=4k count=1 oflag=direct; }
nvme resv-register "$disk" --crkey=7 --nrkey=0x11 --rrega=2
nvme resv-register "$other" --nrkey=0x22 --rrega=0
nvme resv-acquire "$disk" --crkey=0x11 --rtype=1 --racqa=0
nvme resv-report "$other" --eds >report
cat report
grep -E '^(regctl|regstrnt)[[:space:]]*: 2' report
grep -E '^rtype[[:space:]]*: 1' report
grep -E 'rkey[[:space:]]*: (0x)?22' report
can_write "$disk"
fails can_write "$other"
nvme resv-acquire "$other" --crkey=0x22 --prkey=0x11 --rtype=1 --racqa=1
can_write "$other"
fails can_write "$disk"
nvme resv-release "$other" --crkey=0x22 --rtype=1 --rrela=0
can_write "$disk"
nvme resv-register "$other" --crkey=0x22 --rrega=1
no_kernel_warnings 'reservation conflict|sc 0x83|[Mm]ultipath|MULTIPATH'

check commands_of_a_preempted_host_are_aborted
nvme resv-register "$disk" --nrkey=0x11 --rrega=0
nvme resv-register "$other" --nrkey=0x22 --rrega=0
nvme resv-acquire "$disk" --crkey=0x11 --rtype=1 --racqa=0
(while can_write "$disk"; do :; done) &
preempted=$!
nvme resv-acquire "$other" --crkey=0x22 --prkey=0x11 --rtype=1 --racqa=2
wait $preempted
can_write "$other"
nvme resv-register "$other" --crkey=0x22 --rrega=1
disconnect $second
no_kernel_warnings 'reservation conflict|sc 0x83|[Mm]ultipath|MULTIPATH'

check a_controller_is_reset_under_io
begin_io "$disk"
sees_writes "$disk"
nvme reset /dev/$controller
within 60 is_live $controller
sees_writes "$disk"
end_io
no_kernel_warnings .     # Linux logs every lost connection

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
host kill target
serve_disk
within 60 is_live $controller
sees_writes "$disk"
end_io
no_kernel_warnings .

check the_same_port_serves_nvme_tcp_too
modprobe nvme-tcp
nvme connect -t tcp -a "$HOST" -s 3260 -n $NQN --hostnqn="$(name_of 2)" --hostid="$(uuid_of 2)"
first=$controller
find_controller 2
verified_io "$(disk_of $controller 1)" --size=4m
verified_io "$disk" --size=4m
disconnect $controller
disconnect $first
host stop target

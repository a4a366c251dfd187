# NVMe/RDMA over siw, Linux's software iWARP: the kernel's host, with nvme-cli, against `blockmux serve`.
. /lib.sh
. /nvme.inc
. /siw.inc
modprobe nvme-core multipath=N
modprobe nvme_rdma

# serve_disk: from a file, so that it is there again after the target was killed. siw leads to this port alone.
serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=384m'
    protocols = ['nvme_tcp', '$NQN']
    [[nvme_subsystem]]
    nqn = '$NQN'
    namespaces = { 1 = 'disk' }
    [[nvme_subsystem]]
    nqn = 'nqn.2026-11.test:private'
    namespaces = { 1 = 'disk' }
    hosts = ['$(name_of 3)']
END"
  serve "--config blockmux.toml --nvme-tcp $HOST:3260"
}
over_rdma() {
  command=$1 nth=$2
  shift 2
  nvme "$command" -t rdma -a $target -s 3260 --hostnqn="$(name_of "$nth")" --hostid="$(uuid_of "$nth")" "$@"
}
serve_disk

check a_host_that_is_not_allowed_is_refused
fails over_rdma connect 1 -n nqn.2026-11.test:private
kernel_is_content 'Connect for subsystem|Connect Invalid|failed to connect|nvme nvme'

check discovery_names_the_subsystem_with_its_transport
over_rdma discover 1 >found
grep 'trtype: *rdma' found
grep "subnqn: *$NQN" found
fails grep private found

check a_host_connects_with_several_queues
over_rdma connect 1 -n $NQN --nr-io-queues=2 --keep-alive-tmo=5
find_controller 1
test "$(cat /sys/class/nvme/$controller/queue_count)" = 3
test "$(cat /sys/class/nvme/$controller/transport)" = rdma
disk=$(disk_of $controller 1)
test "$(cat "/sys/block/${disk#/dev/}/size")" = 786432

check an_xfs_holds_what_was_copied_into_it
file_system xfs "$disk"

check an_ext4_holds_what_was_copied_into_it
file_system ext4 "$disk"

check fio_finds_what_it_wrote
verified_io "$disk"

check a_reservation_is_taken_and_released
nvme resv-register "$disk" --nrkey=7 --rrega=0
nvme resv-acquire "$disk" --crkey=7 --rtype=1 --racqa=0
nvme resv-report "$disk" -e | grep 'rtype *: 1'
nvme resv-release "$disk" --crkey=7 --rtype=1 --rrela=0

check a_controller_is_reset_under_io
begin_io "$disk"
sees_writes "$disk"
nvme reset /dev/$controller
within 60 is_live $controller
sees_writes "$disk"
end_io
kernel_is_content .     # a connection that is lost has much to say

check io_goes_on_after_the_target_was_killed_and_started_again
begin_io "$disk"
sees_writes "$disk"
host kill target
serve_disk
within 60 is_live $controller
sees_writes "$disk"
end_io
kernel_is_content .

check the_same_port_serves_nvme_tcp_at_once
modprobe nvme-tcp
nvme connect -t tcp -a "$HOST" -s 3260 -n $NQN --hostnqn="$(name_of 2)" --hostid="$(uuid_of 2)"
first=$controller
find_controller 2
verified_io "$(disk_of $controller 1)" --size=4m
verified_io "$disk" --size=4m
disconnect $controller
disconnect $first
host stop target

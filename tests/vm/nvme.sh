# The kernel's NVMe/TCP host, with nvme-cli, against `blockmux serve --nvme-tcp`.
. /lib.sh
. /nvme.inc
# One kernel has the roles of several hosts. Native multipath is off, so each host has separate namespaces instead of paths to
# those of the others, and I/O does not survive a restart of the target. nvme-ana.sh tests restarts.
modprobe nvme-core multipath=N
modprobe nvme-tcp

host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'ram'
  spec = 'mem:512m'
  uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'
  shared = true
  protocols = ['nvme_tcp', '$NQN', 'nbd', 'iscsi']
  [[volume]]
  name = 'file'
  spec = 'file:disk.img?size=384m'
  protocols = ['nvme_tcp', 'nbd', 'iscsi']
  [[volume]]
  name = 'large'
  spec = 'mem:128m?block_size=4096'
  protocols = ['nvme_tcp']
  [[nvme_subsystem]]
  nqn = '$NQN'
  namespaces = { 1 = 'ram', 2 = 'file', 3 = 'large' }
  [[nvme_subsystem]]
  nqn = 'nqn.2026-11.test:private'
  namespaces = { 7 = 'ram' }
  hosts = ['$(name_of 3)']
END"
# The volumes over other protocols.
OTHERS="--nbd unix:nbd --iscsi $HOST:3260"
serve "--config blockmux.toml --state state --nvme-tcp $HOST:4420 --nvme-tcp $HOST:4421 $OTHERS"

check discovery_names_the_subsystems_of_a_host
discover() { nvme discover -t tcp -a "$HOST" -s 4420 --hostnqn="$(name_of "$1")" --hostid="$(uuid_of "$1")"; }
discover 1 >found
grep "subnqn: *$NQN" found
fails grep private found
discover 3 | grep 'subnqn: *nqn.2026-11.test:private'

check a_discovery_controller_is_disconnected_by_the_well_known_name
try_to_connect 1 -n nqn.2014-08.org.nvmexpress.discovery
nvme disconnect -n nqn.2014-08.org.nvmexpress.discovery | grep 'disconnected 1 controller'

check a_host_connects_with_several_queues
connect 1 --nr-io-queues=2 --keep-alive-tmo=5
test "$(cat /sys/class/nvme/$controller/queue_count)" = 3
disk=$(disk_of $controller 1)
test "$(cat "/sys/block/${disk#/dev/}/size")" = 1048576
file=$(disk_of $controller 2)
test "$(cat "/sys/block/${file#/dev/}/size")" = 786432

check identify_data_is_consistent
nvme id-ctrl /dev/$controller >id
for line in 'mn *: Blockmux' 'mdts *: 8' 'cntrltype *: 1' 'oncs *: 0x1bd' 'fuses *: 0x1' 'sgls *: 0x300001'; do
  grep "^$line" id
done
nvme id-ns $disk >id
for line in 'nsze *: 0x100000' 'rescap *: 0xff' 'nmic *: 0x1' 'nacwu *: 2047'; do grep "^$line" id; done
nvme list-ns /dev/$controller | grep -c ':0x[12]$' | grep 2
nvme ns-descs $disk | grep nguid
nvme nvm-id-ctrl /dev/$controller
nvme cmdset-ind-id-ns /dev/$controller -n 1
nvme list-ctrl /dev/$controller
nvme list-subsys

check every_log_page_is_read
nvme smart-log /dev/$controller >log
grep '^critical_warning[[:space:]]*: 0' log
nvme error-log /dev/$controller
nvme fw-log /dev/$controller
nvme effects-log /dev/$controller
nvme changed-ns-list-log /dev/$controller
nvme supported-log-pages /dev/$controller
nvme resv-notif-log /dev/$controller

check features_are_read_and_set
for feature in 6 7 11 15; do nvme get-feature /dev/$controller -f $feature -H; done
nvme get-feature /dev/$controller -f 0x81 --cdw11=1 -l 16
nvme set-feature /dev/$controller -f 0x82 -n 1 --value=0
nvme get-feature $disk -f 0x82 -n 1
nvme get-feature $disk -f 0x83 -n 1

check an_xfs_file_system_keeps_its_files
file_system xfs "$disk"

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check a_namespace_with_blocks_of_4096_bytes_is_a_disk
large=$(disk_of $controller 3)
test "$(cat "/sys/block/${large#/dev/}/queue/logical_block_size")" = 4096
nvme id-ns $large | grep 'lbads:12 .*(in use)'
file_system ext4 "$large"
verified_io "$large"

check blocks_are_compared_copied_zeroed_verified_and_flushed
dd if=/dev/urandom of=random bs=4k count=2
printf y | dd of=random bs=1 seek=8000 conv=notrunc
nvme write $disk -s 64 -c 15 -z 8192 -d random
nvme compare $disk -s 64 -c 15 -z 8192 -d random
dd if=random of=wrong bs=4k count=2
printf x | dd of=wrong bs=1 seek=8000 conv=notrunc
fails nvme compare $disk -s 64 -c 15 -z 8192 -d wrong
nvme copy $disk --sdlba=1024 --slbs=64,72 --blocks=7,7 --format=0
nvme compare $disk -s 1024 -c 15 -z 8192 -d random
nvme verify $disk -s 64 -c 15
nvme write-zeroes $disk -s 1024 -c 7
nvme read $disk -s 1024 -c 15 -z 8192 -d back
is_zero back 1 || head -c 4096 back | cmp - /dev/zero -n 4096
tail -c 4096 random >half
tail -c 4096 back | cmp - half
nvme dsm $disk --ad --slbs=64 --blocks=16
nvme flush $disk -n 1
nvme smart-log /dev/$controller | grep -i 'host[_ ]read[_ ]commands[[:space:]]*: [1-9]'

check a_failed_command_is_in_the_error_log
fails nvme write-uncor $disk -s 64 -c 7
nvme error-log /dev/$controller -e 1 | grep -i 'sqid[[:space:]]*: *[1-9]'

check a_discard_deallocates_blocks_of_the_file
dd if=/dev/urandom of="$file" bs=1M count=16 oflag=direct
host run 'test $(du --block-size=1M disk.img | cut -f 1) -ge 16'
blkdiscard "$file"
host run 'test $(du --block-size=1M disk.img | cut -f 1) -lt 2'

check io_continues_after_resets_of_the_controller
begin_io "$disk"
for reset in 1 2 3; do
  sees_writes "$disk"
  nvme reset /dev/$controller
  within 30 is_live $controller
done
end_io
# The kernel shuts down the socket of a queue while it still sends.
no_kernel_warnings 'resetting controller|failed to send request -(32|104)'

check a_host_may_use_digests
disconnect $controller
connect 1 --hdr-digest --data-digest --nr-io-queues=2
disk=$(disk_of $controller 1)
verified_io "$disk"

check a_host_can_exclude_another_one_from_writing
one=$(disk_of $controller 1)
first=$controller
# Otherwise nvme-cli treats it as the same host.
connect 2 -s 4421
two=$(disk_of $controller 1)
second=$controller
can_write() { dd if=/dev/zero of="$1" bs=4k count=1 oflag=direct; }
can_read() { dd if="$1" of=/dev/null bs=4k count=1 iflag=direct; }
nvme resv-register $one --nrkey=0x11 --rrega=0
nvme resv-register $two --nrkey=0x22 --rrega=0 --cptpl=3
nvme resv-report $one --eds >report
grep -E '^(regctl|regstrnt)[[:space:]]*: 2' report
grep -E 'rkey[[:space:]]*: (0x)?11' report
nvme resv-acquire $one --crkey=0x11 --rtype=1 --racqa=0
can_write $one
can_read $two
fails can_write $two
nvme resv-report $two --eds | grep -E '^rtype[[:space:]]*: 1'
no_kernel_warnings 'reservation conflict|sc 0x83|[Mm]ultipath|MULTIPATH'

check a_reservation_of_a_host_applies_to_nbd_and_iscsi
host run 'head -c 4096 /dev/urandom >little.img'
for url in 'nbd+unix:///ram?socket=nbd' "iscsi://$HOST/iqn.2026-11.blockmux:ram/0"; do
  fails host run "blockmux copy --overwrite file:little.img '$url'"
  host run "blockmux info '$url'"
done

check a_reservation_outlives_a_connection_and_the_daemon
disconnect $first
fails can_write $two
host stop target
serve "--config blockmux.toml --state state --nvme-tcp $HOST:4420 --nvme-tcp $HOST:4421 $OTHERS"
within 60 is_live $second
fails can_write $two
connect 1
one=$(disk_of $controller 1)
first=$controller
can_write $one
no_kernel_warnings .

check a_reservation_can_be_preempted_and_released
nvme resv-acquire $two --crkey=0x22 --prkey=0x11 --rtype=2 --racqa=2
nvme resv-notif-log /dev/$first >log
cat log
grep -iE 'type.*: 1' log
can_write $two
fails can_read $one
fails can_write $one
nvme resv-register $one --nrkey=0x33 --rrega=2 --iekey
fails can_read $one
nvme resv-release $two --crkey=0x22 --rtype=2 --rrela=0
can_write $one
nvme resv-release $one --crkey=0x33 --rrela=1
nvme resv-report $two --eds | grep -E '^(regctl|regstrnt)[[:space:]]*: 0'
disconnect $second
no_kernel_warnings 'reservation conflict|sc 0x83|[Mm]ultipath|MULTIPATH'

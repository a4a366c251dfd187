# The kernel's NBD client against `blockmux serve --nbd`.
. /lib.sh
unimportant='shutting down sockets'
modprobe nbd
# nbd-client writes its PID file there.
mkdir -p /var/run

serve "ram=mem:512m 'disk=file:disk.img?size=384m' --nbd $HOST:10809"

check a_disk_is_connected
# The command that `serve` prints.
nbd-client "$HOST" /dev/nbd0 -N ram -connections 4 -timeout 10
test "$(cat /sys/block/nbd0/size)" = $((512 << 11))

check an_xfs_file_system_keeps_its_files
file_system xfs /dev/nbd0

check an_ext4_file_system_keeps_its_files
file_system ext4 /dev/nbd0

check fio_verifies_its_writes_over_four_connections
verified_io /dev/nbd0 --numjobs=4 --offset_increment=64m --group_reporting

check a_disconnect_removes_the_disk
nbd-client -d /dev/nbd0
test "$(cat /sys/block/nbd0/size)" = 0

# The kernel fails requests in flight when it loses its connections. Flushed data must be present nevertheless.
check flushed_data_survives_a_killed_and_restarted_daemon
nbd-client "$HOST" /dev/nbd1 -N disk -connections 4 -timeout 3
dd if=/dev/urandom of=random bs=1M count=4
dd if=random of=/dev/nbd1 bs=1M conv=fsync
verified_io /dev/nbd1 --offset=64m --rate=,4m &
sees_writes /dev/nbd1
host kill target
fails wait $!
nbd-client -d /dev/nbd1
no_kernel_warnings 'block nbd1: |I/O error, dev nbd1'
serve "'disk=file:disk.img?size=384m' --nbd $HOST:10809"
nbd-client "$HOST" /dev/nbd1 -N disk -connections 4
dd if=/dev/nbd1 bs=1M count=4 iflag=direct | cmp - random
verified_io /dev/nbd1 --offset=64m
nbd-client -d /dev/nbd1
host stop target
no_kernel_warnings

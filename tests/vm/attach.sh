# Volumes as disks of the guest by ublk. Blockmux runs in the guest; the host serves remote volumes.
. /lib.sh
. /ublk.inc
. /attach.inc
unimportant='Power-on or device reset occurred'
mkdir -p /var/run

# follows_sizes: the driver can change the size of a disk (Linux 6.16).
follows_sizes() { ! uname -r | grep -q '^6\.\([0-9]\|1[0-5]\)\.'; }

# has_mib N: the disk has so many MiB.
has_mib() { test "$(cat "/sys/block/$name/size")" = $(($1 << 11)); }
# reads: reads a block. An idle initiator of iSCSI learns of a new size with its next command.
reads() { dd if="$disk" of=read.block bs=4k count=1 iflag=direct; }
sees_mib() { reads && has_mib "$1"; }

# waits_for_its_volume: the kernel or the process has begun the first read of a disk.
waits_for_its_volume() { grep -q '[1-9]' /sys/block/ublkb*/inflight; }
has_no_disk() { fails ls -d /sys/block/ublkb*; }
# flushes: a process reads or flushes an attached disk.
flushes() { grep -qz '^/dev/ublk[b]' /proc/[0-9]*/cmdline; }

has_io_in_flight() { [ "$(awk '{ print $1 + $2 }' "/sys/block/$name/inflight")" -gt 0 ]; }

check without_the_driver_attach_says_how_to_load_it
fails blockmux attach mem:64m --via ublk 2>said
grep 'load the driver with `modprobe ublk_drv`' said
blockmux attach --probe >said || true    # other ways may be usable
grep '^ublk */dev/ublk-control does not exist' said
modprobe ublk_drv
blockmux attach --probe | grep '^ublk *usable'

check a_ram_volume_keeps_the_files_of_an_xfs_file_system
attach mem:512m
test "$(cat "/sys/block/$name/size")" = $((512 << 11))
test "$(cat "/sys/block/$name/queue/logical_block_size")" = 512
file_system xfs "$disk"

check fio_verifies_its_writes
verified_io "$disk" --numjobs=2 --offset_increment=64m --group_reporting
detach

check a_disk_has_the_blocks_of_its_volume
attach 'mem:512m?block_size=4096'
test "$(cat "/sys/block/$name/queue/logical_block_size")" = 4096
file_system xfs "$disk"
detach

check flushes_fua_discards_and_zeroes_reach_the_volume
truncate -s 384M disk.img
attach log:-:file:disk.img
test "$(cat "/sys/block/$name/queue/write_cache")" = 'write back'
dd if=/dev/urandom of="$disk" bs=64k count=4 conv=fsync
grep ' flush ' attach.log
fio --name=fua --filename="$disk" --direct=1 --sync=dsync --rw=write --bs=4k --size=16k --eta=never --output=/dev/null
grep ' write.* fua' attach.log
blkdiscard "$disk"
grep ' discard ' attach.log
mkfs.xfs -q -f "$disk"
grep 'zeroes' attach.log
detach

check a_read_only_disk_refuses_writes
attach --read-only file:disk.img
test "$(cat "/sys/block/$name/ro")" = 1
fails dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct
dd if="$disk" bs=1M count=4 | cmp -n 4194304 - disk.img
detach

check a_volume_is_attached_once
attach file:disk.img
fails blockmux attach file:disk.img 2>said
cat said
detach

check a_mounted_disk_stays_until_it_is_unmounted
rm ready
blockmux attach --json file:disk.img >ready 2>attach.log &
attached=$!
within 60 grep -q '"device":"/dev/ublkb' ready
disk=$(sed 's/.*"device":"\([^"]*\)".*/\1/' ready)
mount -t xfs "$disk" /mnt
kill $attached
within 20 grep "is in use at /mnt; unmount it first" attach.log
echo kept >/mnt/file
umount /mnt
detached
attach file:disk.img
mount -t xfs "$disk" /mnt
test "$(cat /mnt/file)" = kept
umount /mnt
detach

check the_command_of_run_has_the_disk_and_its_status_is_returned
blockmux attach file:disk.img --run 'mount -t xfs $device /mnt && cat /mnt/file && umount /mnt' >said
grep kept said
status=0
blockmux attach mem:64m --run 'exit 7' || status=$?
test $status = 7

check a_killed_process_leaves_the_disk_and_the_next_goes_on_under_io
attach file:disk.img
kept=$disk
begin_io "$disk"
for _ in 1 2; do
  sees_writes "$disk"
  crash
  attach file:disk.img
  grep ', recovered$' ready
  test "$disk" = "$kept"
done
sees_writes "$disk"
end_io
detach

check a_mounted_file_system_outlives_the_process
attach file:disk.img
mkfs.xfs -q -f "$disk"
mount -t xfs "$disk" /mnt
cp -r /usr/lib/modules /mnt/ &
copy=$!
sees_writes "$disk"
crash
attach file:disk.img
wait $copy
sync
crash
attach file:disk.img
echo 3 >/proc/sys/vm/drop_caches
diff -r /usr/lib/modules /mnt/modules
umount /mnt
xfs_repair -n "$disk"
detach

check a_disk_has_a_name_and_its_file_system_is_mounted
attach file:disk.img --name data --mount /mnt
test "$(readlink -f /dev/blockmux/data)" = "$disk"
grep "^$disk /mnt " /proc/mounts
fails blockmux attach mem:64m --name data 2>said
grep "/dev/blockmux/data is $disk; choose another name" said
crash
attach file:disk.img --name data --mount /mnt
grep ', mounted at /mnt, recovered$' ready
sleep 1000 </mnt &
reader=$!
kill $attached
within 20 grep "is in use at /mnt; unmount it first" attach.log
kill $reader
fails wait $reader
detached
fails grep " /mnt " /proc/mounts
test ! -e /dev/blockmux/data
blockmux attach file:disk.img --mount /mnt --run 'test -d $mount/modules'
fails blockmux attach mem:64m --mount /mnt 2>said
grep '^blockmux: /dev/ublkb[0-9]* cannot be mounted: ' said

check the_memory_of_the_process_is_kept_and_that_of_its_command_is_not
attach mem:64m
test "$(cat /proc/$attached/oom_score_adj)" = -1000
fails grep '^VmLck:[[:space:]]*0 kB' /proc/$attached/status
detach
test "$(blockmux attach mem:64m --run 'cat /proc/self/oom_score_adj')" = 0

check a_signal_ends_a_process_that_waits_for_its_volume_and_leaves_nothing
blockmux attach delay:1h:mem:64m 2>attach.log &
attached=$!
within 60 waits_for_its_volume
kill $attached
fails wait $attached
grep 'a signal has ended the process before it was attached' attach.log
within 10 has_no_disk
no_kernel_warnings 'I/O error, dev ublkb|Buffer I/O error on dev ublkb|unable to read (RDB block|partition table)'

check the_disk_of_a_ram_volume_ends_with_its_process
attach mem:64m
kill -9 $attached
fails wait $attached
within 20 test ! -e "$disk"

check a_disk_that_a_process_has_left_can_be_removed
attach file:disk.img
crash
fails blockmux attach file:disk.img --socket socket 2>said
grep "$disk is a disk of the same data.* by --via ublk" said
blockmux attach --forget "$disk"
within 10 test ! -e "$disk"

check a_disk_goes_on_only_with_the_same_volume
attach file:disk.img
crash
fails blockmux attach 'file:disk.img?block_size=4096' 2>said
grep 'with another size' said
truncate -s 320M disk.img
if follows_sizes; then
  attach file:disk.img
  grep ', recovered$' ready
  within 20 has_mib 320
else
  fails blockmux attach file:disk.img 2>said
  grep 'with another size' said
fi
truncate -s 384M disk.img
follows_sizes || attach file:disk.img
detach

check a_remote_volume_is_a_disk_over_nbd_and_over_iscsi
serve "'disk=file:disk.img?size=384m' --nbd $HOST:10809 --iscsi $HOST:3260"
attach "nbd://$HOST/disk"
verified_io "$disk"
fails blockmux attach "nbd://$HOST/disk" 2>said
grep "process $attached ($disk) already uses the same data" said
detach
url=$(blockmux discover "iscsi://$HOST" | grep -o 'iscsi://[^ ]*' | head -n 1)
attach "$url"
file_system ext4 "$disk"

check a_remote_disk_waits_for_a_server_that_is_restarted_and_for_its_own_process
begin_io "$disk"
sees_writes "$disk"
host kill target
serve "'disk=file:disk.img?size=384m' --nbd $HOST:10809 --iscsi $HOST:3260"
sees_writes "$disk"
crash
attach "$url"
sees_writes "$disk"
end_io
detach

check a_disk_follows_the_size_of_its_volume
host kill target
host run 'truncate -s 64M small.img'
serve "small=file:small.img --iscsi $HOST:3260 --control control"
url=$(blockmux discover "iscsi://$HOST" | grep -o 'iscsi://[^ ]*' | head -n 1)
attach "$url"
host run 'blockmux ctl control resize small 96m'
if follows_sizes; then
  within 20 sees_mib 96
  begin_io "$disk"
  sees_writes "$disk"
  crash
  host run 'blockmux ctl control resize small 128m'
  attach "$url"
  grep ', recovered$' ready
  within 20 has_mib 128
  sees_writes "$disk"
  end_io
else
  reads
  within 20 grep 'the kernel sees that when the volume is attached again' attach.log
  detach
  attach "$url"
  has_mib 96
fi
detach
host kill target
serve "'disk=file:disk.img?size=384m' --nbd $HOST:10809"

check a_process_that_is_stopped_for_a_while_loses_nothing
attach file:disk.img
begin_io "$disk"
sees_writes "$disk"
kill -STOP $attached
sleep 5
kill -CONT $attached
sees_writes "$disk"
kill -STOP $attached
crash
attach file:disk.img
sees_writes "$disk"
end_io
detach

check files_that_are_written_faster_than_the_disk_takes_them_fill_the_memory_and_are_kept
attach "nbd://$HOST/disk"
mkfs.ext4 -q -F "$disk"
echo 400000000 >/proc/sys/vm/dirty_bytes
mount -t ext4 "$disk" /mnt
for n in 1 2; do
  dd if=/dev/urandom of=/mnt/file bs=1M count=200 conv=fsync
  sum=$(md5sum </mnt/file)
  echo 3 >/proc/sys/vm/drop_caches
  test "$(md5sum </mnt/file)" = "$sum"
done
umount /mnt
detach

check a_process_that_is_killed_while_its_flush_hangs_leaves_the_disk_to_the_next
attach "nbd://$HOST/disk"
kept=$disk
dd if=/dev/urandom of="$disk" bs=64k count=4
host kill target
kill $attached
within 20 grep -q 'send another signal to remove the disk by force' attach.log
flushes
crash
serve "'disk=file:disk.img?size=384m' --nbd $HOST:10809"
attach "nbd://$HOST/disk"
grep ', recovered$' ready
test "$disk" = "$kept"
detach

check a_disk_whose_server_is_lost_is_removed_by_a_second_signal
attach "nbd://$HOST/disk"
host kill target
dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct &
lost=$!
within 20 has_io_in_flight
kill $attached
within 20 grep -q 'send another signal to remove the disk by force' attach.log
kill $attached
fails wait $attached
grep 'removed by force; what was not flushed is lost' attach.log
fails wait $lost
within 10 test ! -e "$disk"
no_kernel_warnings 'I/O error, dev ublkb|Buffer I/O error on dev ublkb|callbacks suppressed'

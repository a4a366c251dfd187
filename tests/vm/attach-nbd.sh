# Volumes as disks of the guest by its kernel's NBD client. Blockmux runs in the guest; the host serves remote volumes.
. /lib.sh
# Connections of a killed process.
unimportant='Power-on or device reset occurred|block nbd[0-9]+: |nbd[0-9]+: detected capacity change|nbd_xmit_timeout: '
mkdir -p /var/run

# attach ARGUMENTS: attaches a volume in the background; the disk is $disk, its process $attached.
attach() {
  rm -f ready     # of the last disk
  blockmux attach --via nbd "$@" >ready 2>attach.log &
  attached=$!
  within 60 is_ready || {
    cat ready attach.log
    return 1
  }
  disk=$(cut -d ' ' -f 1 ready)
  name=${disk#/dev/}
}
is_ready() { grep -q '^/dev/nbd' ready; }

# detach: stops the process, which flushes and removes the disk.
detach() {
  kill $attached
  detached
}

# detached: waits for the end of a process that was stopped while the disk was in use.
detached() {
  wait $attached
  within 10 is_removed
}
is_removed() { test "$(cat "/sys/block/$name/size")" = 0; }

# crash: kills the process; the disk stays.
crash() {
  kill -9 $attached
  fails wait $attached
  fails is_removed
}

check the_driver_is_loaded_when_it_is_needed
blockmux attach --probe | grep '^nbd *usable'

check without_ublk_it_is_what_the_machine_has
blockmux attach mem:64m --run 'echo $device' >said
grep '^/dev/nbd' said

check a_ram_volume_keeps_the_files_of_an_xfs_file_system
attach mem:512m
test "$(cat "/sys/block/$name/size")" = $((512 << 11))
test "$(cat "/sys/block/$name/queue/logical_block_size")" = 512
test "$(cat "/sys/block/$name/queue/rotational")" = 0
file_system xfs "$disk"

check fio_verifies_its_writes_over_several_connections
verified_io "$disk" --numjobs=2 --offset_increment=64m --group_reporting
detach

check a_disk_has_the_blocks_of_its_volume
attach 'mem:512m?block_size=4096'
test "$(cat "/sys/block/$name/queue/logical_block_size")" = 4096
file_system ext4 "$disk"
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
attach --read-only mem:64m
test "$(cat "/sys/block/$name/ro")" = 1
fails dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct
detach

check a_mounted_disk_stays_until_it_is_unmounted
attach file:disk.img
mkfs.xfs -q -f "$disk"
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
echo 3 >/proc/sys/vm/drop_caches
diff -r /usr/lib/modules /mnt/modules
umount /mnt
xfs_repair -n "$disk"
detach

check a_disk_goes_on_only_with_the_same_volume_and_can_be_removed
attach file:disk.img
crash
truncate -s 320M disk.img
fails blockmux attach --via nbd file:disk.img 2>said
grep 'with another size' said
truncate -s 384M disk.img
fails blockmux attach file:disk.img --socket socket 2>said
grep "$disk is a disk of the same data.* by --via nbd" said
blockmux attach --forget "$disk"
within 10 is_removed

check a_disk_that_another_program_disconnects_ends_the_process
attach file:disk.img
nbd-client -d "$disk"
wait $attached

check a_remote_volume_is_attached_once_and_waits_for_its_server
serve "'disk=file:disk.img?size=384m' --iscsi $HOST:3260"
url=$(blockmux discover "iscsi://$HOST" | grep -o 'iscsi://[^ ]*' | head -n 1)
attach "$url"
fails blockmux attach --via nbd "$url" 2>said
grep "process $attached ($disk) already uses the same data" said
begin_io "$disk"
sees_writes "$disk"
host kill target
serve "'disk=file:disk.img?size=384m' --iscsi $HOST:3260"
sees_writes "$disk"
end_io
detach

check a_disk_whose_volume_is_lost_is_removed_by_a_second_signal
attach "$url"
host kill target
dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct &
lost=$!
sleep 2
kill $attached
within 20 grep -q 'send another signal to remove the disk by force' attach.log
kill $attached
fails wait $attached
grep 'removed by force; what was not flushed is lost' attach.log
fails wait $lost
no_kernel_warnings 'I/O error, dev nbd|Buffer I/O error on dev nbd'

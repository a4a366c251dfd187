# Disks of the guest by vhost-user: Blockmux runs on the host, and QEMU connects to it.
. /lib.sh
modprobe virtio_blk

# attach ARGUMENTS: attaches a volume at the socket `disk` of the host.
attach() {
  host start disk "blockmux attach $* --socket disk"
  host until disk 'by vhost-user'
}

# plug [OPTIONS]: gives the guest the disk; it is $disk.
plug() {
  host monitor 'chardev-add socket,id=disk,path=disk,reconnect=1'
  host monitor "device_add vhost-user-blk-pci,id=disk,chardev=disk,num-queues=2${1:+,$1}"
  within 30 has_disk
}
has_disk() {
  for entry in /sys/block/vd*; do
    disk=/dev/${entry##*/}
    name=${entry##*/}
    test -b "$disk" && return 0
  done
  return 1
}

# unplug: takes the disk away.
unplug() {
  host monitor 'device_del disk'
  within 30 test ! -e "/sys/block/$name"
  # QEMU forgets the disk somewhat later than the guest.
  for _ in 1 2 3 4 5; do
    sleep 1
    host monitor 'chardev-remove disk' && return
  done
  return 1
}

attribute() { cat "/sys/block/$name/$1"; }

check a_ram_volume_keeps_the_files_of_an_xfs_file_system
attach mem:512m
plug
test "$(attribute size)" = $((512 << 11))
test "$(attribute queue/logical_block_size)" = 512
test "$(ls "/sys/block/$name/mq" | wc -l)" = 2
file_system xfs "$disk"

check fio_verifies_its_writes
verified_io "$disk" --numjobs=2 --offset_increment=64m --group_reporting
unplug
host stop disk

check a_disk_has_the_blocks_and_the_cache_of_its_volume
host run 'truncate -s 384M disk.img'
attach "'log:-:file:disk.img?block_size=4096'"
plug
test "$(attribute queue/logical_block_size)" = 4096
test "$(attribute queue/write_cache)" = 'write back'
file_system ext4 "$disk"
blkdiscard "$disk"
mkfs.xfs -q -f "$disk"
dd if=/dev/urandom of="$disk" bs=64k count=4 conv=fsync
unplug
host stop disk

check a_read_only_disk_refuses_writes
attach --read-only file:disk.img
plug
test "$(attribute ro)" = 1
fails dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct
dd if="$disk" of=/dev/null bs=1M count=4
unplug
host stop disk

check a_killed_process_leaves_the_requests_to_the_next
attach file:disk.img
plug
begin_io "$disk"
for _ in 1 2 3; do
  sees_writes "$disk"
  host kill disk
  sleep 1
  attach file:disk.img
done
sees_writes "$disk"

check a_process_that_is_stopped_leaves_the_disk_to_the_next
host stop disk
attach file:disk.img
sees_writes "$disk"
end_io

check a_file_system_outlives_the_process
mkfs.xfs -q -f "$disk"
mount -t xfs "$disk" /mnt
cp -r /usr/lib/modules /mnt/ &
copy=$!
sees_writes "$disk"
host kill disk
attach file:disk.img
wait $copy
sync
echo 3 >/proc/sys/vm/drop_caches
diff -r /usr/lib/modules /mnt/modules
umount /mnt
xfs_repair -n "$disk"

check a_new_size_of_the_volume_is_seen
unplug
host stop disk
serve "disk=mem:256m --nvme-tcp $HOST:4420 --control control"
attach "\$(blockmux discover nvme+tcp://$HOST | grep -o 'nvme+tcp://[^ ]*' | head -n 1)"
plug
test "$(attribute size)" = $((256 << 11))
host run 'blockmux ctl control resize disk 384m'
has_size() { [ "$(attribute size)" = "$1" ]; }
within 30 has_size $((384 << 11))
dd if=/dev/urandom of="$disk" bs=1M seek=300 count=4 oflag=direct
unplug
host stop disk
host stop target

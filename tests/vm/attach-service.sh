# Disks of `blockmux serve` in the guest, by ublk: reload, commands, stop and start, crash and takeover under I/O. The host
# serves a remote volume.
. /lib.sh
. /ublk.inc
unimportant='Power-on or device reset occurred'
mkdir -p /var/run state
chmod 700 state
modprobe ublk_drv

# config [TEXT]: writes the config of the daemon; TEXT is added to it.
config() {
  cat >blockmux.toml <<END
control = "unix:control"
nbd = ["unix:nbd.sock"]
[[volume]]
name = "disk"
spec = "file:disk.img?size=384m"
[[volume]]
name = "remote"
spec = "nbd://$HOST/disk"
$1
END
}
attachment() { printf '[[attachment]]\nvolume = "%s"\nvia = "ublk"\nname = "the-%s"\n' "$1" "$1"; }

# start [ARGUMENTS]: starts the daemon in the background; it is $daemon, and the log is daemon.log.
start() {
  rm -f ready
  blockmux serve --config blockmux.toml --state state "$@" >ready 2>daemon.log &
  daemon=$!
  within 90 grep -q '^ready$' ready || {
    cat ready daemon.log
    return 1
  }
}
stop() {
  kill $daemon
  wait $daemon
}
control() { blockmux ctl unix:control "$@"; }
# disk_of VOLUME: the path of its disk.
disk_of() {
  control status | awk -v volume="$1" '/^[^ ]/ { own = $1 == volume; next } own && $1 == "disk" { sub(",", "", $2); print $2 }'
}

serve "'disk=file:remote.img?size=384m' --nbd $HOST:10809"

check a_daemon_is_ready_when_its_disks_are
config "$(attachment disk)"
start
disk=$(disk_of disk)
test -b "$disk"
grep "^  $disk$" ready
test "$(readlink -f /dev/blockmux/the-disk)" = "$disk"
file_system xfs "$disk"

check only_the_thread_for_disks_has_capabilities
for task in /proc/$daemon/task/*; do
  name=$(cat "$task/comm")
  case $name in
    # The kernel executes control commands on threads of its own.
    privileged | ublk | iou-wrk-*) continue ;;
  esac
  grep -q '^CapPrm:.0*$' "$task/status" || {
    cat "$task/status"
    false
  }
done

check a_disk_has_the_counters_and_the_limits_of_its_volume
control status disk | grep "disk  *$disk by ublk, [1-9][0-9]* requests"
control limit disk iops=20
begun=$(date +%s)
fio --name=slow --filename="$disk" --direct=1 --rw=randread --bs=4k --number_ios=100 --size=64m --eta=never --output=/dev/null
test $(($(date +%s) - begun)) -ge 3
control limit disk none

check the_partitions_of_a_disk_are_found
control add parts=mem:192m
control attach-disk parts
parts=$(disk_of parts)
# One partition of 128 MiB, from sector 2048 on. The kernel reads the table again once it is written.
printf 'o\nn\np\n1\n2048\n+262144\nw\n' | busybox fdisk -u "$parts"
within 20 test -b "${parts}p1"
mkfs.ext4 -q -F "${parts}p1"
control detach-disk parts
test ! -e "${parts}p1"
control attach-disk parts
parts=$(disk_of parts)
within 20 test -b "${parts}p1"
e2fsck -f -n "${parts}p1"
control detach-disk parts
control remove parts

check a_reload_attaches_and_detaches
config "$(attachment disk)
$(attachment remote)"
control reload
remote=$(disk_of remote)
verified_io "$remote"
config "$(attachment disk)"
control reload
test ! -e "$remote"
test ! -L /dev/blockmux/the-remote
test "$(disk_of disk)" = "$disk"

check a_reload_that_would_detach_a_mounted_disk_changes_nothing
mount -t xfs "$disk" /mnt
config
fails control reload 2>said
grep "$disk is in use at /mnt; unmount it first" said
fails control remove disk 2>said
grep 'in use at /mnt' said
test "$(disk_of disk)" = "$disk"
echo kept >/mnt/file
umount /mnt
control reload
test ! -e "$disk"

check commands_attach_and_detach
control attach-disk disk >said
disk=$(cut -d ' ' -f 1 said)
test -b "$disk"
mount -t xfs "$disk" /mnt
test "$(cat /mnt/file)" = kept
fails control detach-disk disk 2>said
grep 'or use --force' said
umount /mnt
control save
grep 'volume = "disk"' blockmux.toml
control detach-disk disk
test ! -e "$disk"
control attach-disk --read-only disk
disk=$(disk_of disk)
fails dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct
control detach-disk disk

check a_stop_removes_an_unused_disk_and_leaves_a_mounted_one_to_the_next_start
config "$(attachment disk)
$(attachment remote)"
control reload
disk=$(disk_of disk) remote=$(disk_of remote)
mount -t xfs "$disk" /mnt
cp -r /usr/lib/modules /mnt/ &
copy=$!
sees_writes "$disk"
stop
grep "$disk stays, and its requests wait" daemon.log
test -b "$disk"
test ! -e "$remote"
start
test "$(disk_of disk)" = "$disk"
control status disk | grep ', recovered'
wait $copy
umount /mnt
mount -t xfs "$disk" /mnt
diff -r /usr/lib/modules /mnt/modules
umount /mnt

check a_daemon_that_is_killed_leaves_its_disks_to_the_next
remote=$(disk_of remote)
begin_io "$remote"
sees_writes "$remote"
kill -9 $daemon
fails wait $daemon
start
test "$(disk_of remote)" = "$remote"
sees_writes "$remote"
end_io

check a_process_that_takes_over_continues_with_the_disks_under_io
mount -t xfs "$disk" /mnt
begin_io "$remote"
fio --name=files --directory=/mnt --rw=randwrite --bs=4k --size=32m --fsync=16 --time_based --runtime=60 --verify=crc32c \
  --verify_fatal=1 --do_verify=1 --eta=never --output=files.fio &
files=$!
for _ in 1 2; do
  sees_writes "$remote"
  sees_writes "$disk"
  old=$daemon
  start --takeover unix:control
  wait $old
  test "$(disk_of disk)" = "$disk"
done
sees_writes "$disk"
sees_writes "$remote"
end_io
wait $files || { cat files.fio; false; }
umount /mnt
xfs_repair -n "$disk"

check a_takeover_without_the_attachment_is_refused
cp blockmux.toml kept.toml
config "$(attachment disk)"
fails blockmux serve --config blockmux.toml --state state --takeover unix:control 2>said
grep 'has attached `remote` as a disk, which this config does not' said
cp kept.toml blockmux.toml
verified_io "$remote"

check a_volume_is_removed_with_its_disk_by_force_only_while_that_is_in_use
mount -t xfs "$disk" /mnt
fails control remove disk
control remove --force disk
test -z "$(disk_of disk)"
umount /mnt || true
no_kernel_warnings 'I/O error|XFS|Buffer I/O error'

check the_disk_of_a_ram_volume_ends_with_its_daemon
control add ram=mem:64m
control attach-disk ram
ram=$(disk_of ram)
mkfs.ext4 -q -F "$ram"
mount -t ext4 "$ram" /mnt
stop
grep "$ram is removed by force" daemon.log
umount /mnt || true
within 20 test ! -e "$ram"
no_kernel_warnings 'I/O error|EXT4|Buffer I/O error|JBD2|Aborting journal'

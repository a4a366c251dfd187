# iPXE boots from an AoE disk of `blockmux serve` on the host, with the command that `serve --verbose` prints. Frames pass a tap
# interface of this machine, which needs root.
. /lib.sh
disk=/dev/etherd/e7.0

check ipxe_and_the_boot_loader_have_read_the_kernel_from_the_disk
grep BOOT_IMAGE=/vmlinuz /proc/cmdline

check programs_run_from_a_root_file_system_on_the_disk
ip link set eth2 mtu 9000 up
modprobe ext4
modprobe aoe aoe_iflist=eth2
has_disk() {
  aoe-discover
  test -b ${disk}p1
}
within 60 has_disk
mount -t ext4 ${disk}p1 /mnt
test "$(stat -c %s /mnt/vmlinuz)" -gt 1000000
cp /usr/bin/busybox /mnt/
sync
echo 3 >/proc/sys/vm/drop_caches
chroot /mnt /busybox sh -c 'echo booted >/result && sync'
test "$(cat /mnt/result)" = booted
umount /mnt
host stop disk

# The firmware (SeaBIOS) boots from a disk by vhost-user: QEMU has no kernel but what GRUB loads from the disk. Blockmux runs on the host.
. /lib.sh
modprobe virtio_blk
modprobe ext4

check the_firmware_and_the_boot_loader_have_read_the_kernel_from_the_disk
grep BOOT_IMAGE=/vmlinuz /proc/cmdline
within 30 test -b /dev/vda1
mount -t ext4 /dev/vda1 /mnt
test "$(stat -c %s /mnt/vmlinuz)" -gt 1000000

check programs_run_from_a_root_file_system_on_the_disk
cp /usr/bin/busybox /mnt/
sync
echo 3 >/proc/sys/vm/drop_caches
chroot /mnt /busybox sh -c 'echo booted >/result && sync'
test "$(cat /mnt/result)" = booted

check the_disk_outlives_the_process_that_serves_it
host kill disk
host start disk 'blockmux attach file:disk.img --socket disk'
host until disk 'by vhost-user'
echo 3 >/proc/sys/vm/drop_caches
test "$(chroot /mnt /busybox cat /result)" = booted
umount /mnt

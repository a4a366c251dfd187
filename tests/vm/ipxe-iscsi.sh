# iPXE boots from an iSCSI logical unit of `blockmux serve` on the host, with the commands that `serve --verbose` prints: QEMU has no
# kernel but what iPXE and GRUB load from there. Then Linux goes on with the same logical unit.
. /lib.sh
. /open-iscsi.inc
modprobe -a iscsi_ibft ext4

check ipxe_and_the_boot_loader_have_read_the_kernel_from_the_logical_unit
grep BOOT_IMAGE=/vmlinuz /proc/cmdline

check ipxe_leaves_linux_the_target_and_the_secret
table=/sys/firmware/ibft
test "$(cat $table/initiator/initiator-name)" = "$INITIATOR"
test "$(cat $table/target0/target-name)" = iqn.2026-11.test:boot
test "$(cat $table/target0/ip-addr)" = "$HOST"
test "$(cat $table/target0/chap-name)" = guest

check linux_logs_in_with_what_ipxe_has_left
iscsiadm -m fw -l
disk=$(iscsi_disk boot 10)
within 30 test -b "${disk}1"

check programs_run_from_a_root_file_system_on_the_logical_unit
mount -t ext4 "${disk}1" /mnt
test "$(stat -c %s /mnt/vmlinuz)" -gt 1000000
cp /usr/bin/busybox /mnt/
sync
echo 3 >/proc/sys/vm/drop_caches
chroot /mnt /busybox sh -c 'echo booted >/result && sync'
test "$(cat /mnt/result)" = booted
umount /mnt
iscsiadm -m node -T iqn.2026-11.test:boot -u
host stop disk

# iPXE boots from an iSCSI logical unit of `blockmux serve` on the host, with the commands that `serve --verbose` prints: QEMU has no
# kernel but what iPXE and GRUB load from there. Then Linux goes on with the same logical unit.
. /lib.sh
. /ipxe.inc
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
runs_programs_from "${disk}1"
iscsiadm -m node -T iqn.2026-11.test:boot -u
host stop disk

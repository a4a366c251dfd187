# iPXE boots from an AoE disk of `blockmux serve` on the host, with the command that `serve --verbose` prints. Frames pass a tap
# interface of this machine, which needs root.
. /lib.sh
. /ipxe.inc
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
runs_programs_from ${disk}p1
host stop disk

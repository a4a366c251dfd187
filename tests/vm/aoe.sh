# Linux's AoE driver and aoetools against `blockmux serve --aoe`. Frames pass a tap interface of this machine, which needs root.
. /lib.sh

disk=/dev/etherd/e7.0
# The disk's directory in sysfs.
block='/dev/etherd!e7.0'
has_disk() {
  aoe-discover
  test -b "$disk"
}
serve_disk() {
  serve "'disk=file:disk.img?size=256m' --aoe $TAP --aoe-shelf 7"
}

# no_driver_warnings: fails if the driver has logged a problem. It logs most problems below the level of warnings, which
# no_kernel_warnings does not check.
no_driver_warnings() {
  if grep -E 'aoe: .*(ata error|runt|lost jumbo|falling back|cannot|fail|no mem|invalid|too )' kernel.all; then
    echo "the driver has logged a problem"
    return 1
  fi
}

host run "ip link set $TAP mtu 9000 up"
ip link set eth2 mtu 9000 up
serve_disk
modprobe aoe aoe_iflist=eth2

check aoe_discover_finds_the_disk
within 60 has_disk
test "$(cat '/sys/block/etherd!e7.0/size')" = $((256 << 11))
within 30 grep up '/sys/block/etherd!e7.0/state'
aoe-stat | grep -E 'e7\.0 .* up'

check frames_are_as_large_as_the_mtu_allows
within 30 grep 8704 '/sys/block/etherd!e7.0/payload'

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$block"
host kill target
serve_disk
sees_writes "$block"
end_io

check io_continues_after_the_interface_was_down
begin_io "$disk"
sees_writes "$block"
host run "ip link set $TAP down"
host run "ip link set $TAP up"
sees_writes "$block"
end_io
host stop target
no_kernel_warnings
no_driver_warnings

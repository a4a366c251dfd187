# SRP over siw, Linux's software iWARP: dm-multipath over two paths of the kernel's initiator to one unit of `blockmux serve`.
. /lib.sh
. /siw.inc
. /srp.inc
modprobe -a ib_srp sd_mod dm_multipath dm_round_robin
no_kernel_warnings 'siw: |device-mapper: core'
id=1111111111111111
host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'disk'
  spec = 'file:disk.img?size=192m'
  [[srp_target]]
  port_id = '0x${id}2222222222222222'
  luns = { 0 = 'disk' }
END"
serve_disk() { serve "--config blockmux.toml --srp $HOST:3260 --srp $HOST:3261"; }
# add_path ADDRESS NTH: adds a path; returns its SCSI host in $scsi_host and its disk in $disk. A lost path fails its I/O
# after a second, and reconnects by itself.
add_path() {
  log_in 2222222222222222 "$1" ",initiator_ext=000000000000000$2"
  scsi_host=$(hosts | tail -1)
  disk=$(srp_disk "$scsi_host")
  port=/sys/class/srp_remote_ports/port-$scsi_host:1
  echo off >"$port/dev_loss_tmo"
  echo 1 >"$port/fast_io_fail_tmo"
  echo 2 >"$port/reconnect_delay"
}
# known_to_udev DISK: provides udev's data of a disk to multipathd, because the guest has no udev.
known_to_udev() {
  mkdir -p /run/udev/data
  wwid=$(cat "/sys/block/${1#/dev/}/device/wwid")
  printf 'I:1\nE:ID_SERIAL=%s\nE:ID_WWN=%s\n' "$wwid" "$wwid" >"/run/udev/data/b$(cat "/sys/block/${1#/dev/}/dev")"
}
# has_paths COUNT: succeeds if COUNT of the two paths are active.
has_paths() { [ "$(multipathd show paths format '%d %t %T' | grep -c 'active.*ready')" = "$1" ]; }
is_lost() { ! grep -x running "/sys/class/srp_remote_ports/port-$1:1/state"; }
is_there() { grep -x running "/sys/class/srp_remote_ports/port-$1:1/state"; }
serve_disk

check two_paths_lead_to_one_disk
add_path $target 1
first=$scsi_host
known_to_udev "$disk"
add_path $other_target 2
second=$scsi_host
known_to_udev "$disk"
mkdir -p /etc/multipath
cat >/etc/multipath.conf <<END
defaults {
  path_grouping_policy multibus
  path_selector "round-robin 0"
  path_checker tur
  prio const
  no_path_retry queue
  polling_interval 1
  max_polling_interval 1
  retrigger_tries 0
  find_multipaths no
}
END
multipathd
within 30 has_paths 2
multipathd show maps
disk=/dev/$(multipathd show maps raw format %d)
test "$(cat "/sys/block/${disk#/dev/}/size")" = 393216
verified_io "$disk" --size=4m
no_kernel_warnings 'ib_srp|scsi host|device-mapper'

check io_continues_on_the_other_path_when_one_is_lost
begin_io "$disk"
sees_writes "$disk"
lose_path $other_target
within 60 is_lost "$second"
within 60 has_paths 1
sees_writes "$disk"
restore_path $other_target
within 60 is_there "$second"
within 60 has_paths 2
lose_path $target
within 60 is_lost "$first"
within 60 has_paths 1
sees_writes "$disk"
restore_path $target
within 60 is_there "$first"
within 60 has_paths 2
sees_writes "$disk"
end_io
no_kernel_warnings .     # Linux logs every lost connection

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
host kill target
within 60 is_lost "$first"
within 60 is_lost "$second"
serve_disk
within 60 has_paths 2
sees_writes "$disk"
end_io
no_kernel_warnings .
multipathd shutdown
log_out "$first"
log_out "$second"
host stop target

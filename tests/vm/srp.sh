# SRP over siw, Linux's software iWARP: the kernel's initiator against `blockmux serve`.
. /lib.sh
. /siw.inc
. /srp.inc
modprobe -a ib_srp sd_mod
no_kernel_warnings 'siw: '

# serve_disk: serves a file, so that its data survives a killed target. siw forwards only this port.
serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=192m'
    protocols = ['srp', '0x11111111111111112222222222222222']
    [[srp_target]]
    port_id = '0x11111111111111112222222222222222'
    luns = { 0 = 'disk' }
    [[srp_target]]
    port_id = '0x11111111111111113333333333333333'
    luns = { 0 = 'disk' }
    [[srp_target.acl]]
    initiator_port = '0x00000000000000990000000000000000'
END"
  serve "--config blockmux.toml --srp $HOST:3260"
}
serve_disk

check logins_to_a_missing_port_and_to_one_of_others_are_rejected
fails log_in 4444444444444444 $target
fails log_in 3333333333333333 $target
no_kernel_warnings 'ib_srp|scsi host'

check the_kernel_logs_in_with_several_channels
log_in 2222222222222222 $target ,ch_count=2
first=$(hosts | head -1)
disk=$(srp_disk "$first")
test "$(cat "/sys/block/${disk#/dev/}/size")" = 393216
grep -x 2 "/sys/class/scsi_host/host$first/ch_count"
no_kernel_warnings 'ib_srp|scsi host'

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check a_unit_is_reset_under_io
# Commands that a reset has aborted get no response; the kernel aborts them after their timeout.
echo 5 >"/sys/block/${disk#/dev/}/device/timeout"
begin_io "$disk"
sees_writes "$disk"
sg_reset --device "$disk"
sees_writes "$disk"
end_io
no_kernel_warnings 'SRP'

check two_initiators_have_their_own_reservations
log_in 2222222222222222 $target ,initiator_ext=0000000000000007
second=$(hosts | tail -1)
other=$(srp_disk "$second")
sg_persist --out --register --param-sark=1 "$disk"
sg_persist --out --reserve --param-rk=1 --prout-type=1 "$disk"
sg_persist --out --register --param-sark=2 "$other"
sg_persist --in --read-full-status "$disk" >status
cat status
grep -i 'RDMA' status
fails dd if=/dev/zero of="$other" bs=4096 count=1 oflag=direct
dd if=/dev/zero of="$disk" bs=4096 count=1 oflag=direct
sg_persist --out --preempt --param-rk=2 --param-sark=1 --prout-type=1 "$other"
fails dd if=/dev/zero of="$disk" bs=4096 count=1 oflag=direct
no_kernel_warnings 'ib_srp|scsi host|reservation|sd .*: |critical|I/O error|callbacks suppressed'

check commands_of_a_preempted_initiator_are_aborted
# Two channels take the commands in any order, so one pass does not show whether both share the unit attentions.
for _ in $(seq 20); do
  sg_persist --out --clear --param-rk=2 "$other"
  sg_persist --out --register --param-sark=1 "$disk"
  sg_persist --out --register --param-sark=2 "$other"
  sg_persist --out --reserve --param-rk=1 --prout-type=1 "$disk"
  (while dd if=/dev/zero of="$disk" bs=4096 count=1 oflag=direct; do :; done) &
  preempted=$!
  sg_persist --out --preempt-abort --param-rk=2 --param-sark=1 --prout-type=1 "$other"
  wait $preempted
  dd if=/dev/zero of="$other" bs=4096 count=1 oflag=direct
done
sg_persist --out --clear --param-rk=2 "$other"
dd if=/dev/zero of="$disk" bs=4096 count=1 oflag=direct
log_out "$second"
no_kernel_warnings 'ib_srp|scsi host|reservation|sd .*: |critical|I/O error|callbacks suppressed'

check a_target_port_reports_its_alua_state
sg_rtpg --decode "$disk" >groups
cat groups
grep -i 'active/optimized' groups

check io_continues_after_the_target_is_killed_and_restarted
port=/sys/class/srp_remote_ports/port-$first:1
echo off >"$port/fast_io_fail_tmo"
echo 2 >"$port/reconnect_delay"
begin_io "$disk"
sees_writes "$disk"
host kill target
within 60 grep -v running "$port/state"
serve_disk
within 60 grep running "$port/state"
sees_writes "$disk"
end_io
no_kernel_warnings .     # Linux logs every lost connection

check long_requests_have_a_table_of_their_ranges
log_out "$first"
long=,max_sect=8192,sg_tablesize=1024,allow_ext_sg=1
# One registration covers 2 MiB, so a request of 4 MiB has two ranges.
# Just after a logout ib_srp may still count the old session.
within 20 log_in 2222222222222222 $target $long
first=$(hosts | head -1)
disk=$(srp_disk "$first")
long_io() {
  echo 4096 >"/sys/block/${1#/dev/}/queue/max_sectors_kb"
  verified_io "$1" --bsrange=4m-4m --size=32m --iodepth=2
}
long_io "$disk"
log_out "$first"
no_kernel_warnings 'ib_srp|scsi host|sd .*: '

check a_table_that_is_longer_than_the_command_is_read_from_the_initiator
# Without registrations every page is a range; a command holds one descriptor of the table.
rmmod ib_srp
modprobe ib_srp never_register=Y
no_kernel_warnings 'unsafe|UNSAFE|siw: '
log_in 2222222222222222 $target $long,cmd_sg_entries=1
first=$(hosts | head -1)
disk=$(srp_disk "$first")
verified_io "$disk"
long_io "$disk"
no_kernel_warnings 'ib_srp|scsi host|sd .*: '

log_out "$first"
host stop target

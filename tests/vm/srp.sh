# SRP over siw, Linux's software iWARP: the kernel's initiator against `blockmux serve`.
. /lib.sh
. /siw.inc
. /srp.inc
modprobe -a ib_srp sd_mod
kernel_is_content 'siw: '

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

check a_port_that_is_not_there_and_one_that_is_not_for_us_are_rejected
fails log_in 4444444444444444 $target
fails log_in 3333333333333333 $target
kernel_is_content 'ib_srp|scsi host'

check the_kernel_logs_in_with_several_channels
log_in 2222222222222222 $target ,ch_count=2
first=$(hosts | head -1)
disk=$(disk_of "$first")
test "$(cat "/sys/block/${disk#/dev/}/size")" = 393216
grep -x 2 "/sys/class/scsi_host/host$first/ch_count"
kernel_is_content 'ib_srp|scsi host'

check an_ext4_holds_what_was_copied_into_it
file_system ext4 "$disk"

check fio_finds_what_it_wrote
verified_io "$disk"

check a_long_request_has_a_table_of_its_ranges
fio --name=long --filename="$disk" --rw=write --bs=4m --size=64m --direct=1 --verify=crc32c --ioengine=libaio --iodepth=4 --output-format=terse >/dev/null

check a_unit_is_reset_under_io
# Commands that a reset has aborted get no response; the kernel aborts them after their timeout.
echo 5 >"/sys/block/${disk#/dev/}/device/timeout"
begin_io "$disk"
sees_writes "$disk"
sg_reset --device "$disk"
sees_writes "$disk"
end_io
kernel_is_content 'SRP'

check two_initiators_have_their_own_reservations
log_in 2222222222222222 $target ,initiator_ext=0000000000000007
second=$(hosts | tail -1)
other=$(disk_of "$second")
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
sg_persist --out --clear --param-rk=2 "$other"
log_out "$second"
kernel_is_content 'ib_srp|scsi host|reservation|sd .*: |critical|I/O error'

check io_goes_on_after_the_target_was_killed_and_started_again
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
kernel_is_content .     # Linux logs every lost connection

log_out "$first"
host stop target

# The kernel's iSCSI initiator against a target under faults and changes: resets, a kill, growth, reservations.
. /lib.sh
. /open-iscsi.inc

# serve_disk SIZE: serves a file, which is created or extended to SIZE.
serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=$1'
    [[iscsi_target]]
    TargetName = 'iqn.2026-11.test:open'
    luns = { 0 = 'disk' }
END"
  serve "--config blockmux.toml --iscsi $HOST:3260"
}

serve_disk 256m
iscsiadm -m discovery -t sendtargets -p "$HOST"
set_up open node.session.timeo.replacement_timeout 60
node open --login
disk=$(iscsi_disk open 0)

check io_continues_after_resets_of_unit_and_target
begin_io "$disk"
for reset in device target device; do
  sees_writes "$disk"
  sg_reset --no-esc --$reset "$disk"
done
end_io

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
host kill target
within 60 grep FAILED /sys/class/iscsi_session/session1/state
serve_disk 256m
within 60 grep LOGGED_IN /sys/class/iscsi_session/session1/state
sees_writes "$disk"
end_io

# The target requests a logout and gets one; the next session repeats the commands in flight.
check io_continues_after_the_target_is_stopped_and_restarted
begin_io "$disk"
sees_writes "$disk"
host stop target
within 60 grep 'requests logout within 1 seconds' iscsid.log
within 60 grep FAILED /sys/class/iscsi_session/session1/state
serve_disk 256m
within 60 grep LOGGED_IN /sys/class/iscsi_session/session1/state
sees_writes "$disk"
end_io

check flushed_data_survives_a_killed_target
mkfs.ext4 -q -F "$disk"
mount -t ext4 "$disk" /mnt
dd if=/dev/urandom of=random bs=1M count=4
cp random /mnt
sync -f /mnt/random
host kill target
serve_disk 256m
cp random /mnt/another
umount /mnt
e2fsck -f -n "$disk"
mount -t ext4 "$disk" /mnt
cmp random /mnt/random
cmp random /mnt/another
umount /mnt

check the_new_size_of_a_volume_that_has_grown_is_visible
host stop target
serve_disk 320m
within 60 grep LOGGED_IN /sys/class/iscsi_session/session1/state
echo 1 >"/sys/block/${disk#/dev/}/device/rescan"
test "$(cat "/sys/block/${disk#/dev/}/size")" = $((320 << 11))
verified_io "$disk" --offset=280m
node open --logout

check an_initiator_can_exclude_another_one_from_writing
for name in one two; do
  iscsiadm -m iface -I $name -o new
  iscsiadm -m iface -I $name -o update -n iface.initiatorname -v "$INITIATOR.$name"
done
iscsiadm -m discovery -t sendtargets -p "$HOST" -I one -I two
node open -I one --login
node open -I two --login
one=$(iscsi_disk open 0 1) two=$(iscsi_disk open 0 2)
sg_persist --out --register --param-sark=1 "$one"
sg_persist --out --register --param-sark=2 "$two"
sg_persist --in --read-keys "$two" | grep -c '^ *0x[12]$' | grep 2
can_write() { dd if=/dev/zero of="$1" bs=4k count=1 oflag=direct; }
can_read() { dd if="$1" of=/dev/null bs=4k count=1 iflag=direct; }
sg_persist --out --reserve --param-rk=1 --prout-type=1 "$one"
can_write "$one"
can_read "$two"
fails can_write "$two"
no_kernel_warnings 'reservation conflict'

check a_reservation_outlives_its_holders_session
node open -I one --logout
fails can_write "$two"
no_kernel_warnings 'reservation conflict'

# open-iscsi logs in with a new ISID each time, so this session is a new initiator port without a registration.
check a_reservation_can_be_preempted
node open -I one --login
one=$(iscsi_disk open 0 2)
can_read "$one"
sg_persist --out --preempt --param-rk=2 --param-sark=1 --prout-type=3 "$two"
sg_persist --in --read-reservation "$one" | grep 'Exclusive Access'
can_write "$two"
fails can_read "$one"
fails can_write "$one"
sg_persist --out --clear --param-rk=2 "$two"
can_write "$one"
node open --logout
no_kernel_warnings 'reservation conflict'
host stop target

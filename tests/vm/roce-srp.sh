# SRP over software RoCEv2 against Linux's initiator and target over rxe. Blockmux runs in the guest.
. /lib.sh
srp_device=rxe0 srp_port=5555
. /srp.inc
. /rxe.inc
. /roce-storage.inc
. /lio-rdma.inc
modprobe -a ib_srp sd_mod
# On a slow machine rxe ends connections now and then (rxe.inc); Linux connects again.
recovery='ib_srp|scsi host|sd .*: '
serve_disk

check linux_logs_in_to_srp_over_rocev2_with_several_channels
fails log_in 4444444444444444 $our_ipv4
# By default ib_srp asks for 7 retries, which rxe takes for any number: it would not notice that a server is gone.
log_in 2222222222222222 $our_ipv4 ,ch_count=2,tl_retry_count=3
first=$(hosts | head -1)
disk=$(srp_disk "$first")
port=/sys/class/srp_remote_ports/port-$first:1
echo off >"$port/fast_io_fail_tmo"
echo 2 >"$port/reconnect_delay"
grep -x 2 "/sys/class/scsi_host/host$first/ch_count"
no_kernel_warnings "$recovery"

check fio_verifies_its_writes_by_srp
verified_io "$disk" --size=8m
no_kernel_warnings "$recovery"

check an_xfs_file_system_on_srp_keeps_its_files
file_system xfs "$disk"
no_kernel_warnings "$recovery"

check srp_loses_no_data_with_1_percent_of_packets_lost
lose_packets
keeps_files "$disk"
verified_io "$disk" --size=2m
lose_no_packets
no_kernel_warnings .

check srp_loses_no_data_with_packets_lost_and_reordered
lose_and_reorder_packets
verified_io "$disk" --size=1m
lose_no_packets
no_kernel_warnings .

check srp_continues_after_the_server_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
kill_server
within 60 grep -v running "$port/state"
serve_disk
within 60 grep running "$port/state"
sees_writes "$disk"
end_io
log_out "$first"
no_kernel_warnings .     # Linux logs every lost connection
kill_server

check our_initiator_copies_to_ib_srpt_over_rocev2
truncate -s 32M theirs.img
lio_disk /disks/theirs.img 32
srpt_target rxe0 $srp_port $rxe_ipv4
url="srp://$rxe_ipv4:$srp_port/$guid$guid/0?rdma=roce"
in_ours blockmux discover "$url" >found
grep "$guid$guid/0" found
describes_32_mib "$url"
copies_data "$url"
fails is_zero theirs.img 8
no_kernel_warnings .

check our_initiator_copies_to_ib_srpt_with_packets_lost_and_reordered
lose_and_reorder_packets
copies_data "$url"
lose_no_packets
no_kernel_warnings .

# iSER over software RoCEv2 against Linux's initiator and target over rxe. Blockmux runs in the guest.
. /lib.sh
. /open-iscsi.inc
. /rxe.inc
. /roce-storage.inc
. /lio-rdma.inc
modprobe ib_iser
# On a slow machine rxe ends connections now and then (rxe.inc); Linux connects again.
recovery='iser|connection[0-9]*:0|sd .*: '
serve_disk
over_iser() { iscsiadm -m node -T $iqn -p $our_ipv4 "$@"; }

check linux_logs_in_to_iser_over_rocev2
over_iser -o new -I iser
over_iser -o update -n node.session.timeo.replacement_timeout -v 60
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
disk=$(iscsi_disk disk 0)

check fio_verifies_its_writes_by_iser
verified_io "$disk" --size=8m
no_kernel_warnings "$recovery"

check an_xfs_file_system_on_iser_keeps_its_files
file_system xfs "$disk"
no_kernel_warnings "$recovery"

check iser_loses_no_data_with_1_percent_of_packets_lost
lose_packets
keeps_files "$disk"
# With more commands in flight rxe ends the connection at each loss (rxe.inc), and Linux repeats a command five times.
verified_io "$disk" --size=2m --iodepth=1
lose_no_packets
no_kernel_warnings .

check iser_loses_no_data_with_packets_lost_and_reordered
lose_and_reorder_packets
verified_io "$disk" --size=1m --iodepth=1
lose_no_packets
no_kernel_warnings .

check iser_continues_after_the_server_is_killed_and_restarted
session=/sys/class/iscsi_session/session1
begin_io "$disk"
sees_writes "$disk"
kill_server
within 60 grep FAILED $session/state
serve_disk
within 60 grep LOGGED_IN $session/state
sees_writes "$disk"
end_io
over_iser --logout
no_kernel_warnings .     # Linux logs every lost connection
kill_server

check our_initiator_copies_to_lio_over_rocev2
lio_disk /disks/theirs.img 32
isert_target $iqn $rxe_ipv4:3260
url="iser://$rxe_ipv4:3260/$iqn/0?rdma=roce"
in_ours blockmux discover "iser://$rxe_ipv4:3260?rdma=roce" >found
grep "$iqn/0" found
describes_32_mib "$url"
# LIO ends a connection if the data of a write takes longer than 3 seconds, so little of it is in flight.
copies_data "$url" --bs 64k --iodepth 4
fails is_zero theirs.img 8
no_kernel_warnings .

check our_initiator_copies_to_lio_with_packets_lost_and_reordered
lose_and_reorder_packets
copies_data "$url" --bs 64k --iodepth 4
lose_no_packets
no_kernel_warnings .

# Storage over an RDMA device: rxe, Linux's software RoCEv2, which Blockmux uses by rdma-core. Both sides are at one address of the
# guest, and rxe turns the packets around: our sides against each other, against Linux's initiators and against Linux's target.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
modprobe -a rdma_rxe rdma_ucm ib_iser ib_srp nvme_rdma sd_mod
# The daemon's memory that the device uses is pinned.
ulimit -l unlimited
address=10.88.0.15 fabric=verbs ours=
. /rdma-storage.inc
rdma link add rxe0 type rxe netdev eth1
ip link set eth1 up
ip addr add $address/24 dev eth1
has_gid() { grep -q 0000:0000:0000:0000:0000:ffff:0a58:000f /sys/class/infiniband/rxe0/ports/1/gids/*; }
within 20 has_gid

check two_processes_exchange_messages_reads_and_writes_by_windows
verbs_peer serve $address --count 50 --invalidate >served &
within 20 grep ready served
verbs_peer ping $address --count 50 --size 70001 | tee pinged
wait $!
grep '^50 rounds of 70001 bytes came back, 100 windows invalidated by the peer$' pinged
grep '^served 50 rounds$' served

check rping_is_served_and_serves
verbs_peer serve $address --count 20 >served-rping &
within 20 grep ready served-rping
rping -c -a $address -C 20 -S 5000 -V
wait $!
rping -s -a $address -C 20 -S 60000 &
within 20 sh -c "verbs_peer ping $address --count 20 --size 6000 >pinged 2>&1" || { cat pinged; false; }
wait $!
grep '^20 rounds of 6000 bytes came back, 0 windows invalidated by the peer$' pinged

check a_peer_cannot_read_behind_the_memory_that_is_opened_to_it
verbs_peer serve $address --trespass >trespass &
within 20 grep ready trespass
fails verbs_peer ping $address --size 70001
wait $!
grep '^memory behind the buffer cannot be read: work has failed: RemoteAccess$' trespass
no_kernel_warnings 'make_send_cqe: non-flush error status'

serve_disk mem:32m

check our_nvme_initiator_and_target_copy_over_a_device
url="nvme+rdma://$address:4420/$NQN/1?rdma=verbs"
blockmux discover "nvme+rdma://$address:4420?rdma=verbs" >found || { cat found served; false; }
grep "$NQN/1" found
describes_32_mib "$url"
copies_data "$url"
copies_data "$url&connections=2"
bench_verifies "$url"

check our_iser_initiator_and_target_copy_over_a_device
url="iser://$address:3260/$iqn/0?rdma=verbs"
copies_data "$url"
bench_verifies "$url"

check our_srp_initiator_and_target_copy_over_a_device
url="srp://$address:5555/0x$port_id/0?rdma=verbs"
copies_data "$url"
bench_verifies "$url"

check our_initiators_and_targets_copy_over_a_device_by_ipv6
kill_server
ip addr add fd88::15/64 dev eth1 nodad
has_ipv6_gid() { grep -q fd88:0000:0000:0000:0000:0000:0000:0015 /sys/class/infiniband/rxe0/ports/1/gids/*; }
within 20 has_ipv6_gid
ipv4=$address
address='[fd88::15]'
serve_disk mem:32m
for place in "nvme+rdma://$address:4420/$NQN/1" "iser://$address:3260/$iqn/0" "srp://$address:5555/0x$port_id/0"; do
  copies_data "$place?rdma=verbs"
done
kill_server
address=$ipv4
serve_disk mem:32m

check an_initiator_says_where_nothing_listens
fails blockmux info "nvme+rdma://$address:4999/$NQN/1?rdma=verbs" 2>refused
cat refused
grep -i 'refused' refused

kill_server
serve_disk

check linux_connects_to_nvme_over_a_device
connect_nvme
no_kernel_warnings 'nvme nvme'

check fio_verifies_its_writes_by_nvme
verified_io "$disk" --size=8m
no_kernel_warnings 'nvme nvme'

check an_xfs_file_system_on_nvme_keeps_its_files
file_system xfs "$disk"
no_kernel_warnings 'nvme nvme'

check nvme_continues_after_the_server_is_killed_and_restarted
nvme_survives_a_kill
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection

check a_port_that_is_down_for_a_moment_ends_nothing
# The host is idle: rxe ends a connection at once whose packet it cannot send.
connect_nvme 60
ip link set eth1 down
within 20 grep 'port 1 of the RDMA device rxe0 is down: its 3 connections end' served
ip link set eth1 up
within 20 grep 'port 1 of the RDMA device rxe0 is up again' served
verified_io "$disk" --size=4m
test "$(cat /sys/class/nvme/$controller/state)" = live

check a_port_that_stays_down_ends_its_connections
ip link set eth1 down
within 30 grep 'port 1 of the RDMA device rxe0 stays down: 3 connections end' served
ip link set eth1 up
blockmux info "nvme+tcp://$address:4420/$NQN/1"
# rxe's connection manager sends nothing any more after a packet that it could not send (rxe_requester), so the device is made anew.
kill_server
disconnect $controller
rdma link delete rxe0
rdma link add rxe0 type rxe netdev eth1
within 20 has_gid
serve_disk
no_kernel_warnings .

check linux_logs_in_to_srp_over_a_device_and_fio_verifies_its_writes
srp_device=rxe0 srp_port=5555
. /srp.inc
log_in 2222222222222222 $address
srp_host=$(hosts)
verified_io "$(srp_disk "$srp_host")" --size=8m
log_out "$srp_host"
no_kernel_warnings 'ib_srp|scsi host'

check linux_logs_in_to_iser_over_a_device_and_fio_verifies_its_writes
. /open-iscsi.inc
over_iser() { iscsiadm -m node -T $iqn -p $address "$@"; }
over_iser -o new -I iser
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
verified_io "$(iscsi_disk disk 0)" --size=8m
over_iser --logout
no_kernel_warnings .
kill_server

check our_nvme_initiator_copies_to_nvmet_over_a_device
. /nvmet-target.inc
copies_to_nvmet $address 4421
close_port 1
no_kernel_warnings .

check our_srp_initiator_copies_to_ib_srpt_over_a_device
. /lio-rdma.inc
truncate -s 32M theirs.lio
lio_disk /disks/theirs.lio 32
srpt_target rxe0 5555 $address
url="srp://$address:5555/$guid$guid/0?rdma=verbs"
blockmux discover "$url" >found
grep "$guid$guid/0" found
copies_data "$url"
bench_verifies "$url"
fails is_zero theirs.lio 8
no_kernel_warnings .

check our_iser_initiator_copies_to_lio_over_a_device
isert_target iqn.2026-11.test:open $address:3270
url="iser://$address:3270/iqn.2026-11.test:open/0?rdma=verbs"
copies_data "$url" --bs 64k --iodepth 4
no_kernel_warnings .

# Storage over an iWARP device: siw, Linux's software iWARP, which Blockmux uses by rdma-core. It has no memory windows, and the
# buffers of RDMA Reads need remote rights, so connections are confined to buffers of their own. Both sides are at one address of the
# guest: our sides against each other and against Linux's. Blockmux outside has iWARP in software.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
. /siw.inc
modprobe -a rdma_ucm ib_iser ib_srp nvme_rdma sd_mod
unimportant="$unimportant|siw: "
# The daemon's memory that the device uses is pinned.
ulimit -l unlimited
address=10.88.0.15 fabric=verbs ours=
. /rdma-storage.inc

check the_device_is_ready_and_has_no_memory_windows
blockmux rdma --json >found
cat found
grep -F '"name":"siw0","kind":"iWARP"' found
grep -F '"memory_windows":null' found
blockmux rdma
blockmux rdma --json | grep -F '"ready":true'

check two_processes_exchange_messages_reads_and_writes
verbs_peer serve $address --count 50 >served &
within 20 grep ready served
verbs_peer ping $address --count 50 --size 70001 | tee pinged
wait $!
grep '^50 rounds of 70001 bytes came back' pinged
grep '^served 50 rounds$' served

check rping_is_served_and_serves
verbs_peer serve $address --count 20 >served-rping &
within 20 grep ready served-rping
rping -c -a $address -C 20 -S 5000 -V
wait $!
rping -s -a $address -C 20 -S 60000 &
within 20 sh -c "verbs_peer ping $address --count 20 --size 6000 >pinged 2>&1" || { cat pinged; false; }
wait $!
grep '^20 rounds of 6000 bytes came back' pinged

check a_peer_cannot_read_behind_the_memory_that_is_opened_to_it
verbs_peer serve $address --trespass >trespass &
within 20 grep ready trespass
fails verbs_peer ping $address --size 70001
wait $!
grep '^memory behind the buffer cannot be read: ' trespass
# RFC 5040: a remote protection error, base and bounds violation.
dmesg | grep 'siw: got TERMINATE. layer 0, type 1, code 1'

serve_disk mem:32m

check the_ports_of_listeners_are_those_of_the_device
rdma resource show cm_id | tee listening
for port in 3260 4420 5555; do grep "state LISTEN .*src-addr $address:$port" listening; done
fails grep 'not served' served

check our_nvme_initiator_and_target_copy_over_an_iwarp_device
url="nvme+rdma://$address:4420/$NQN/1?rdma=verbs"
blockmux discover "nvme+rdma://$address:4420?rdma=verbs" >found || { cat found served; false; }
grep "$NQN/1" found
describes_32_mib "$url"
copies_data "$url"
copies_data "$url&connections=2"
bench_verifies "$url"

check our_iser_initiator_and_target_copy_over_an_iwarp_device
url="iser://$address:3260/$iqn/0?rdma=verbs"
copies_data "$url"
bench_verifies "$url"

check our_srp_initiator_and_target_copy_over_an_iwarp_device
url="srp://$address:5555/0x$port_id/0?rdma=verbs"
copies_data "$url"
bench_verifies "$url"

check an_initiator_says_where_nothing_listens
fails blockmux info "nvme+rdma://$address:4999/$NQN/1?rdma=verbs" 2>refused
cat refused
grep -i 'refused' refused

check blockmux_outside_copies_to_the_device_by_iwarp_in_software
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'
# A connection that ends before its first message is a BUG of iw_cm in Linux 6.12 (cm_close_handler), so there is one that does not.
url="iser://$GUEST:3261/$iqn/0?rdma=iwarp&connections=1"
host run "blockmux copy --overwrite --verify file:source.img '$url'"
host run "blockmux copy --overwrite '$url' file:back.img && cmp source.img back.img"

check blockmux_outside_serves_iwarp_in_software_to_the_device
host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'disk'
  spec = 'mem:32m'
  [[nvme_subsystem]]
  nqn = '$NQN'
  namespaces = { 1 = 'disk' }
END"
serve "--config blockmux.toml --nvme-tcp $HOST:3260"
copies_data "nvme+rdma://$target:3260/$NQN/1?rdma=verbs"
bench_verifies "nvme+rdma://$target:3260/$NQN/1?rdma=verbs"
host stop target

kill_server
serve_disk

check linux_connects_to_nvme_over_an_iwarp_device
connect_nvme
no_kernel_warnings 'nvme nvme'

check fio_verifies_its_writes_by_nvme
verified_io "$disk" --size=8m
no_kernel_warnings 'nvme nvme'

check nvme_continues_after_the_server_is_killed_and_restarted
nvme_survives_a_kill
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection

check linux_logs_in_to_srp_over_an_iwarp_device_and_fio_verifies_its_writes
srp_device=siw0 srp_port=5555
. /srp.inc
log_in 2222222222222222 $address
srp_host=$(hosts)
verified_io "$(srp_disk "$srp_host")" --size=8m
log_out "$srp_host"
no_kernel_warnings 'ib_srp|scsi host'

check linux_logs_in_to_iser_over_an_iwarp_device_and_fio_verifies_its_writes
. /open-iscsi.inc
over_iser() { iscsiadm -m node -T $iqn -p $address "$@"; }
over_iser -o new -I iser
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
verified_io "$(iscsi_disk disk 0)" --size=8m
over_iser --logout
no_kernel_warnings .

check a_removed_device_ends_its_connections
url="nvme+rdma://$address:4420/$NQN/1?rdma=verbs"
blockmux bench "$url" --rw randread --bs 4k --iodepth 4 --runtime 60 --runs 1 --no_ceiling >benched 2>&1 &
bench=$!
# Both ends of the admin queue and of an I/O queue.
has_queues() { [ "$(rdma resource show cm_id | grep -c 'state CONNECT ')" -ge 4 ]; }
within 30 has_queues
rdma link delete siw0 &
deleting=$!
within 30 grep 'the RDMA device was removed: no connections are accepted until one has the address again' served
# One side learns it from the device, and the other possibly from its peer.
within 30 grep 'connection lost' benched
within 30 grep 'connection lost.*nvme-rdma' served
# The drivers of Linux's software devices wait for processes that have them open.
kill -9 $bench
wait $bench || true
kill_server
wait $deleting
no_kernel_warnings .
rdma link add siw0 type siw netdev eth1

check our_nvme_initiator_copies_to_nvmet_over_an_iwarp_device
. /nvmet-target.inc
copies_to_nvmet $address 4421
close_port 1
no_kernel_warnings .

check our_iser_initiator_copies_to_lio_over_an_iwarp_device
. /lio-rdma.inc
truncate -s 32M theirs.iser
lio_disk /disks/theirs.iser 32
# A portal also listens on TCP, and siw uses the TCP port of the same number.
isert_target iqn.2026-11.test:open 0.0.0.0:3270 unshare -n
url="iser://$address:3270/iqn.2026-11.test:open/0?rdma=verbs"
copies_data "$url"
bench_verifies "$url"

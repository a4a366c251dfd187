# Storage over an RDMA device: rxe, Linux's software RoCEv2, which Blockmux uses by rdma-core. Both sides are at one address of the
# guest, and rxe turns the packets around: our sides against each other, against Linux's initiators and against Linux's target.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
modprobe -a rdma_rxe rdma_ucm ib_iser ib_srp nvme_rdma sd_mod
# The daemon's memory that the device uses is pinned.
ulimit -l unlimited
mount -t configfs none /sys/kernel/config
mkdir /disks
mount -t tmpfs -o size=800m tmpfs /disks
cd /disks
address=10.88.0.15
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
verbs_peer serve $address --count 20 >served &
within 20 grep ready served
rping -c -a $address -C 20 -S 5000 -V
wait $!
rping -s -a $address -C 20 -S 60000 &
within 20 sh -c "verbs_peer ping $address --count 20 --size 6000 >pinged 2>&1" || { cat pinged; false; }
wait $!
grep '^20 rounds of 6000 bytes came back, 0 windows invalidated by the peer$' pinged

iqn=iqn.2026-11.test:disk
port_id=11111111111111112222222222222222

# serve_disk SPEC: serves a volume by all protocols.
serve_disk() {
  cat >blockmux.toml <<END
[[volume]]
name = 'disk'
spec = '$1'
[[nvme_subsystem]]
nqn = '$NQN'
namespaces = { 1 = 'disk' }
[[iscsi_target]]
TargetName = '$iqn'
luns = { 0 = 'disk' }
[[srp_target]]
port_id = '0x$port_id'
luns = { 0 = 'disk' }
END
  rm -f ready
  blockmux serve --config blockmux.toml --json --nvme-tcp "$address:4420?rdma=verbs" \
    --iscsi "$address:3260?rdma=verbs" --srp "$address:5555?rdma=verbs" >ready 2>>served &
  server=$!
  within 60 test -s ready
}
kill_server() {
  kill -9 $server
  wait $server || true
}
# copies_data URL: our initiator writes data, and reads it back.
copies_data() {
  rm -f back.img
  blockmux copy --overwrite --verify file:source.img "$1"
  blockmux copy --overwrite "$1" file:back.img
  cmp source.img back.img
}
bench_verifies() { blockmux bench "$1" --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling; }
dd if=/dev/urandom of=source.img bs=1M count=8 2>dd.log
truncate -s 32M source.img
serve_disk mem:32m

check our_nvme_initiator_and_target_copy_over_a_device
url="nvme+rdma://$address:4420/$NQN/1?rdma=verbs"
blockmux discover "nvme+rdma://$address:4420?rdma=verbs" >found || { cat found served; false; }
grep "$NQN/1" found
blockmux info --json "$url" | grep '"size": *33554432'
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

check an_initiator_says_where_nothing_listens
fails blockmux info "nvme+rdma://$address:4999/$NQN/1?rdma=verbs" 2>refused
cat refused
grep -i 'refused' refused

# A file, so that its data survives a killed server.
kill_server
file='file:/disks/disk.img?size=384m'
serve_disk "$file"

check linux_connects_to_nvme_over_a_device
nvme connect -t rdma -a $address -s 4420 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=2 \
  --keep-alive-tmo=5 --reconnect-delay=2
find_controller 1
test "$(cat /sys/class/nvme/$controller/queue_count)" = 3
disk=$(disk_of $controller 1)
no_kernel_warnings 'nvme nvme'

check fio_verifies_its_writes_by_nvme
verified_io "$disk" --size=8m
no_kernel_warnings 'nvme nvme'

check an_xfs_file_system_on_nvme_keeps_its_files
file_system xfs "$disk"
no_kernel_warnings 'nvme nvme'

check nvme_continues_after_the_server_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
kill_server
serve_disk "$file"
within 60 is_live $controller
sees_writes "$disk"
end_io
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection

check linux_logs_in_to_srp_over_a_device_and_fio_verifies_its_writes
add=$(echo /sys/class/infiniband_srp/srp-rxe0-1/add_target)
echo "id_ext=1111111111111111,ioc_guid=2222222222222222,dest=$address:5555,queue_size=64" >"$add"
host_of_srp() { ls -d /sys/class/srp_remote_ports/port-*; }
within 20 host_of_srp
srp_host=$(host_of_srp | sed 's/.*port-//; s/:.*//')
srp_disk() { ls -d /sys/class/scsi_host/host$srp_host/device/target*/*/block/*; }
within 20 srp_disk
verified_io "/dev/$(basename "$(srp_disk)")" --size=8m
echo 1 >"/sys/class/srp_remote_ports/port-$srp_host:1/delete"
is_gone() { ! test -e "/sys/class/scsi_host/host$srp_host"; }
within 60 is_gone
no_kernel_warnings 'ib_srp|scsi host'

check linux_logs_in_to_iser_over_a_device_and_fio_verifies_its_writes
. /open-iscsi.inc
over_iser() { iscsiadm -m node -T $iqn -p $address "$@"; }
over_iser -o new -I iser
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
verified_io "$(disk_of disk 0)" --size=8m
over_iser --logout
no_kernel_warnings .
kill_server

check our_nvme_initiator_copies_to_nvmet_over_a_device
modprobe -a nvmet nvmet_rdma
truncate -s 32M theirs.img
subsystem=/sys/kernel/config/nvmet/subsystems/$NQN
mkdir "$subsystem"
echo 1 >"$subsystem/attr_allow_any_host"
mkdir "$subsystem/namespaces/1"
printf %s /disks/theirs.img >"$subsystem/namespaces/1/device_path"
echo 1 >"$subsystem/namespaces/1/buffered_io"
echo 1 >"$subsystem/namespaces/1/enable"
port=/sys/kernel/config/nvmet/ports/1
mkdir $port
echo ipv4 >$port/addr_adrfam
echo rdma >$port/addr_trtype
echo $address >$port/addr_traddr
echo 4421 >$port/addr_trsvcid
ln -s "$subsystem" "$port/subsystems/$NQN"
no_kernel_warnings nvmet
url="nvme+rdma://$address:4421/$NQN/1?rdma=verbs"
blockmux discover "nvme+rdma://$address:4421?rdma=verbs" >found
grep "$NQN/1" found
blockmux info --json "$url" | grep '"size": *33554432'
copies_data "$url"
fails is_zero theirs.img 8
copies_data "$url&connections=2"
bench_verifies "$url"
rm "$port/subsystems/$NQN"
no_kernel_warnings .

# NVMe/RDMA over software RoCEv2 against Linux's initiator and target over rxe. Blockmux runs in the guest.
. /lib.sh
. /nvme.inc
. /rxe.inc
. /roce-storage.inc
modprobe nvme-core multipath=N
modprobe nvme_rdma
# On a slow machine rxe ends connections now and then; the host connects again, and repeats its commands.
recovery='nvme nvme'
serve_disk

check linux_discovers_a_subsystem_over_rocev2
nvme discover -t rdma -a $our_ipv4 -s 4420 --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" >found
cat found
grep "subnqn: *$NQN" found

check linux_connects_to_nvme_over_rocev2_with_several_queues
nvme connect -t rdma -a $our_ipv4 -s 4420 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=2 \
  --keep-alive-tmo=5 --reconnect-delay=2
find_controller 1
test "$(cat /sys/class/nvme/$controller/queue_count)" = 3
disk=$(disk_of $controller 1)

check fio_verifies_its_writes_by_nvme
verified_io "$disk" --size=8m
no_kernel_warnings "$recovery"

check an_xfs_file_system_on_nvme_keeps_its_files
file_system xfs "$disk"
no_kernel_warnings "$recovery"

check nvme_loses_no_data_with_1_percent_of_packets_lost
lose_packets
keeps_files "$disk"
verified_io "$disk" --size=2m
lose_no_packets
no_kernel_warnings .

check nvme_continues_after_the_server_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
kill_server
serve_disk
within 60 is_live $controller
sees_writes "$disk"
end_io
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection
kill_server

check our_initiator_copies_to_nvmet_over_rocev2
modprobe -a nvmet nvmet_rdma
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
echo $rxe_ipv4 >$port/addr_traddr
echo 4420 >$port/addr_trsvcid
ln -s "$subsystem" "$port/subsystems/$NQN"
no_kernel_warnings nvmet
url="nvme+rdma://$rxe_ipv4:4420/$NQN/1?rdma=roce"
in_ours blockmux discover "nvme+rdma://$rxe_ipv4:4420?rdma=roce" >found
grep "$NQN/1" found
describes_32_mib "$url"
copies_data "$url"
copies_data "$url&connections=2"
bench_verifies "$url"

check our_initiator_copies_to_nvmet_with_1_percent_of_packets_lost
copies_data_despite_losses "$url"
rm "$port/subsystems/$NQN"
no_kernel_warnings .

# NVMe/RDMA over software RoCEv2 against Linux's host over rxe. Blockmux runs in the guest.
. /lib.sh
. /nvme.inc
. /rxe.inc
. /roce-storage.inc
modprobe nvme-core multipath=N
modprobe nvme_rdma
# In the emulated guest a connection over rxe is lost now and then, for a reason that is not known yet. The host then connects
# again and repeats its commands.
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

disconnect $controller
kill_server

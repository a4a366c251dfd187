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
connect_nvme

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
nvme_survives_a_kill
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection
kill_server

check our_initiator_copies_to_nvmet_over_rocev2
. /nvmet-target.inc
copies_to_nvmet $rxe_ipv4 4420

check our_initiator_copies_to_nvmet_with_1_percent_of_packets_lost
lose_packets
copies_data "$url"
lose_no_packets
close_port 1
no_kernel_warnings .

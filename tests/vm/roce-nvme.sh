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

check nvme_loses_no_data_with_packets_lost_and_reordered
lose_and_reorder_packets
verified_io "$disk" --size=1m
lose_no_packets
no_kernel_warnings .

check nvme_continues_after_the_server_is_killed_and_restarted
nvme_survives_a_kill
disconnect $controller
no_kernel_warnings .     # Linux logs every lost connection
kill_server

check linux_connects_to_nvme_by_both_families_of_addresses_where_we_listen_at_all
for address in 0.0.0.0 '[::]'; do
  serve_disk
  case $address in 0.0.0.0) own=$our_ipv4 ;; *) own=$our_ipv6 ;; esac
  nvme connect -t rdma -a $own -s 4420 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=2
  find_controller 1
  verified_io "$(disk_of $controller 1)" --size=2m
  disconnect $controller
  kill_server
done
no_kernel_warnings "$recovery"

check our_initiator_copies_to_nvmet_over_rocev2
. /nvmet-target.inc
copies_to_nvmet $rxe_ipv4 4420

check our_initiator_copies_to_nvmet_with_1_percent_of_packets_lost
lose_packets
copies_data "$url"
lose_no_packets

check our_initiator_copies_to_nvmet_with_packets_lost_and_reordered
lose_and_reorder_packets
copies_data "$url"
lose_no_packets
close_port 1
no_kernel_warnings .

# Every protocol: one side uses rxe by rdma-core, and the other is RoCEv2 in software.
check blockmux_by_verbs_and_blockmux_in_software_copy_to_each_other
ulimit -l unlimited
in_software=$ours
places() { echo "nvme+rdma://$address:4420/$NQN/1 iser://$address:3260/$iqn/0 srp://$address:5555/0x$port_id/0"; }
address=$our_ipv4
serve_disk mem:32m
ours=
for place in $(places); do copies_data "$place?rdma=verbs"; done
kill_server
address=$rxe_ipv4 fabric=verbs
serve_disk mem:32m
ours=$in_software
for place in $(places); do copies_data "$place?rdma=roce"; done
kill_server
no_kernel_warnings .

# How fast RDMA is beside Linux's own, as ratios: the guest is emulated, so that the figures say nothing by themselves. RAM disks on
# both sides. Only that something was measured is tested; target/vm/roce-speed.log has the tables.
. /lib.sh
. /nvme.inc
. /rxe.inc
. /roce-storage.inc
. /nvmet-target.inc
modprobe nvme-core multipath=N
modprobe -a nvme_rdma nvmet_rdma
ulimit -l unlimited
recovery='nvme nvme'

# A third place, whose software RoCEv2 our initiator reaches as it reaches rxe: by a pair of interfaces.
third=10.77.1.3
ip netns add third
ip link add third netns third type veth peer name to_third netns ours
ip netns exec third sh -c "ip link set lo up; ip addr add $third/24 dev third; ip link set third up
  for queue in /sys/class/net/third/queues/rx-*; do echo 1 >\$queue/rps_cpus; done"
in_ours sh -c "ip addr add 10.77.1.2/24 dev to_third; ip link set to_third up
  for queue in /sys/class/net/to_third/queues/rx-*; do echo 1 >\$queue/rps_cpus; done"

truncate -s 32M theirs.img     # on tmpfs
nvmet_disk /disks/theirs.img
nvmet_port 1 rdma $rxe_ipv4 4421
open_port 1
no_kernel_warnings nvmet
theirs="nvme+rdma://$rxe_ipv4:4421/$NQN/1"

# bench ARGUMENTS: measures several places in turn; shows the table.
bench() {
  rm -rf report
  $ours blockmux bench --no_ceiling --runs 5 --runtime 1 --poll never --report report "$@" >table 2>&1 || { cat table; false; }
  cat table
  fails grep -i failed table
}

check our_software_target_beside_nvmet_over_rxe_for_the_same_initiator
ours='ip netns exec third' address=$third
serve_disk mem:32m
ours=in_ours
for bs in 4k 64k; do
  bench "nvme+rdma://$third:4420/$NQN/1?rdma=roce" "$theirs?rdma=roce" --rw randread,randwrite --bs $bs --iodepth 1,32 --overwrite
done
kill_server
no_kernel_warnings "$recovery|nvmet"

# cpu: hundredths of a second for which the guest's CPUs have worked.
cpu() { awk '$1 == "cpu" { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; }
# cpu_of NAME COMMAND: the CPU time of the guest, of both sides together, for each read of the command, whose output is fio's JSON.
cpu_of() {
  name=$1
  shift
  begun=$(cpu)
  "$@" >said.json || { cat said.json; false; }
  ended=$(cpu)
  reads=$(sed -n 's/.*"total_ios" : *\([1-9][0-9]*\),.*/\1/p; s/.*"total_ios": *\([1-9][0-9]*\),.*/\1/p' said.json | head -n 1)
  echo "$name: $(((ended - begun) * 10000 / reads)) us of CPU for each of $reads reads"
}

check cpu_of_our_initiator_by_verbs_beside_linux
# The target is the same, and rxe turns the packets around.
nvme connect -t rdma -a $rxe_ipv4 -s 4421 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=1
find_controller 1
disk=$(disk_of $controller 1)
for depth in 1 32; do
  for round in 1 2 3 4 5; do
    cpu_of "Linux, depth $depth" fio --name=reads --filename="$disk" --direct=1 --ioengine=libaio --rw=randread --bs=4k \
      --iodepth=$depth --time_based --runtime=5 --output-format=json
    cpu_of "ours, depth $depth" blockmux bench "$theirs?rdma=verbs" --no_ceiling --rw randread --bs 4k --iodepth $depth --runs 1 \
      --runtime 5 --ramp_time 0 --poll never --json
  done
done
disconnect $controller
close_port 1
no_kernel_warnings .

# Our NVMe/RDMA initiator against nvmet-rdma over siw: the kernel's target, which is in the guest here.
. /lib.sh
. /nvme.inc
. /siw.inc
. /nvmet-target.inc
modprobe nvmet_rdma
# A controller that has lost its connections to a closed port ends when its keep-alive time has passed.
unimportant='siw: |nvmet_rdma: |nvmet: ctrl [0-9]+ (keep-alive timer|fatal error)'

# A disk of 32 MiB in memory.
truncate -s 32M disk
nvmet_disk "$PWD/disk"
nvmet_port 1 rdma 10.88.0.15 3260
nvmet_port 2 rdma 10.88.0.15 3261
open_port 1
open_port 2
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'
url="nvme+rdma://$GUEST:3261/$NQN/1?rdma=iwarp"

check discovery_names_the_subsystem
host run "blockmux discover 'nvme+rdma://$GUEST:3261?rdma=iwarp' >found; cat found
  grep '$NQN/1' found"

check a_namespace_is_described_over_rdma
host run "blockmux info '$url' && blockmux info --json '$url' | grep '\"size\": *33554432'"

check copied_data_is_read_back
host run "blockmux copy --overwrite --verify file:source.img '$url'"
host run "blockmux copy --overwrite '$url&connections=4' file:back.img"
host run "cmp source.img back.img"
fails is_zero disk 8

check the_bench_verifies_its_writes
host run "blockmux bench '$url' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"
host run "blockmux bench '$url&crc=on' --rw randwrite --bs 64k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

check a_copy_continues_after_an_outage_of_the_target
: >disk
truncate -s 32M disk
has_data() { ! is_zero disk 1; }
host start copy "blockmux copy --overwrite --verify 'rate:bw=4m:file:source.img' '$url'"
within 60 has_data
close_port 1
fails host run "blockmux info '$url&ctrl_loss_tmo=0'"
open_port 1
host wait copy
host run "blockmux copy --overwrite '$url' file:back.img && cmp source.img back.img"
no_kernel_warnings .     # Linux logs the removal of a target

check a_copy_continues_on_the_other_path_when_one_is_lost
both="nvme+rdma://$GUEST:3261,$GUEST:3262/$NQN/1?rdma=iwarp"
: >disk
truncate -s 32M disk
host start copy "blockmux copy --overwrite --verify 'rate:bw=4m:file:source.img' '$both'"
within 60 has_data
close_port 2
fails host run "blockmux info 'nvme+rdma://$GUEST:3262/$NQN/1?rdma=iwarp&ctrl_loss_tmo=0'"
open_port 2
close_port 1
host wait copy
fails host run "blockmux info '$url&ctrl_loss_tmo=0'"
open_port 1
host run "blockmux copy --overwrite '$both' file:back.img && cmp source.img back.img"
no_kernel_warnings .

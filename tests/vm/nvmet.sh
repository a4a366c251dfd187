# Our NVMe/TCP initiator against nvmet-tcp, the kernel's target, which is in the guest here.
. /lib.sh
. /nvme.inc
. /nvmet.inc
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'
url="nvme+tcp://$GUEST/$NQN/1"

check discovery_names_the_subsystem
host run "blockmux discover nvme+tcp://$GUEST >found; cat found
  grep '$NQN/1' found"

check a_namespace_is_described
host run "blockmux info '$url' && blockmux info --json '$url' | grep '\"size\": *33554432'"

check copied_data_is_read_back
host run "blockmux copy --overwrite --verify file:source.img '$url'"
host run "blockmux copy --overwrite '$url?connections=4' file:back.img"
host run "cmp source.img back.img"
fails is_zero disk 8

check digests_and_a_short_queue_work
host run "blockmux copy --overwrite --verify file:source.img '$url?hdr_digest=on&data_digest=on&queue_size=8'"
host run "blockmux copy --overwrite '$url?hdr_digest=on' file:back.img && cmp source.img back.img"

check the_bench_verifies_its_writes
host run "blockmux bench '$url' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

check a_copy_continues_after_an_outage_of_the_target
: >disk
truncate -s 32M disk
has_data() { ! is_zero disk 1; }
host start copy "blockmux copy --overwrite --verify 'rate:bw=4m:file:source.img' '$url'"
within 60 has_data
close_port 1
fails host run "blockmux info '$url?ctrl_loss_tmo=0'"
open_port 1
host wait copy
host run "blockmux copy --overwrite '$url' file:back.img && cmp source.img back.img"
no_kernel_warnings .     # Linux logs the removal of a target

check io_uses_the_optimized_port_and_continues_on_the_other
nvmet_port 2 tcp "$GUEST" 4421
second=$nvmet/ports/2
echo non-optimized >"$second/ana_groups/1/ana_state"
open_port 2
paths="nvme+tcp://$GUEST,$GUEST:4421/$NQN/1?iopolicy=queue-depth"
: >disk
truncate -s 32M disk
host start copy "blockmux copy --overwrite --verify 'rate:bw=2m:file:source.img' '$paths'"
within 60 has_data
# The first path is inaccessible for a while, then the second, then the first is removed.
echo inaccessible >"$port/ana_groups/1/ana_state"
sleep 1
echo optimized >"$port/ana_groups/1/ana_state"
echo inaccessible >"$second/ana_groups/1/ana_state"
sleep 1
echo optimized >"$second/ana_groups/1/ana_state"
close_port 1
host wait copy
host run "blockmux copy --overwrite '$paths' file:back.img && cmp source.img back.img"
open_port 1
host run "blockmux copy --overwrite '$url?paths=all' file:back.img && cmp source.img back.img"
close_port 2
rmdir "$second"
no_kernel_warnings .

# A gateway: the kernel's target, our initiator, our target, the kernel's host.
check a_namespace_that_grows_is_reported_through_a_gateway
serve "disk=$url --nvme-tcp $HOST:4420"
NQN=nqn.2026-11.blockmux:disk
connect 1
node=$(disk_of $controller 1)
test "$(cat "/sys/block/${node#/dev/}/size")" = $((32 << 11))
verified_io "$node"
truncate -s 48M disk
echo 1 >"$subsystem/namespaces/1/revalidate_size"
has_grown() { test "$(cat "/sys/block/${node#/dev/}/size")" = $((48 << 11)); }
within 60 has_grown
dd if=/dev/urandom of=random bs=1M count=4
dd if=random of="$node" bs=1M seek=40 oflag=direct
dd if=disk bs=1M skip=40 count=4 | cmp - random
disconnect $controller
host stop target

# Our SRP initiator against Linux's ib_srpt over siw: the kernel's target, which is in the guest here.
. /lib.sh
. /siw.inc
. /lio-rdma.inc
# Besides, LIO warns of WRITE SAME beyond a limit that its Block Limits page leaves out; siw and ib_srpt log connects and
# disconnects.
unimportant="$unimportant|RDMA CMA: cma_listen_on_dev|callbacks suppressed|WRITE_SAME sectors|siw: |ib_srpt|rejected SRP_LOGIN_REQ"

# A disk of 32 MiB in memory.
truncate -s 32M disk
lio_disk "$PWD/disk" 32
srpt_target siw0 3260 10.88.0.15
place="srp://$GUEST:3261"
url="$place/$guid$guid/0?rdma=iwarp"
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'

check a_login_to_a_missing_target_port_is_rejected
fails host run "blockmux info '$place/0x${guid}0000000000000001/0'"
no_kernel_warnings .

check a_unit_is_described_and_listed
host run "blockmux info '$url' && blockmux info --json '$url' | grep '\"size\": *33554432'"
host run "blockmux discover '$url' >found; cat found
  grep '$guid$guid/0' found"

check copied_data_is_read_back
host run "blockmux copy --overwrite --verify file:source.img '$url'"
host run "blockmux copy --overwrite '$url&connections=2' file:back.img"
host run "cmp source.img back.img"
fails is_zero disk 8

check the_bench_verifies_its_writes
host run "blockmux bench '$url' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"
host run "blockmux bench '$url&crc=on&immediate_data=off' --rw randwrite --bs 4k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

check a_unit_is_reset
host run "blockmux reset '$url'"
no_kernel_warnings 'reset|LUN_RESET|TARGET_CORE'

check a_copy_continues_after_an_outage_of_the_target
: >disk
truncate -s 32M disk
has_data() { ! is_zero disk 1; }
host start copy "blockmux copy --overwrite --verify 'rate:bw=4m:file:source.img' '$url'"
within 60 has_data
# Disabling the port under I/O never ends in Linux 6.12 over siw, so its listener goes and its connections are closed.
echo 0 >$lio/srpt/discovery_auth/rdma_cm_port
ss -K sport = :3260
fails host run "blockmux info '$url&reconnect=0s'"
echo 3260 >$lio/srpt/discovery_auth/rdma_cm_port
host wait copy
host run "blockmux copy --overwrite '$url' file:back.img && cmp source.img back.img"
no_kernel_warnings .     # Linux logs every lost connection

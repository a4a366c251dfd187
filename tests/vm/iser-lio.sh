# Our iSER initiator against LIO's isert over siw: the kernel's target, which is in the guest here.
. /lib.sh
. /siw.inc
. /lio-rdma.inc
# siw logs disconnected peers. So does LIO if its last response has not left, and it may warn when it releases that command.
unimportant="$unimportant|siw: |isert: isert_(qp_event_callback|print_wc)"
known_traces='iscsi_target_util\.c:[0-9]+ iscsit_release_cmd'

# A disk of 400 MiB in memory.
mount -t tmpfs -o size=402m tmpfs /mnt
truncate -s 400M /mnt/disk
lio_disk /mnt/disk 400
# A portal also listens on TCP, and siw uses the TCP port of the same number, so they are in different networks.
isert_target iqn.2026-11.test:open 0.0.0.0:3260 unshare -n
open="iser://$GUEST:3261/iqn.2026-11.test:open/0?rdma=iwarp"

check a_disk_is_described_over_iwarp
host run "blockmux info --json '$open' >info; cat info
  grep '\"size\": *419430400' info"

check copied_data_of_400_mib_is_read_back
host run 'head -c 400M /dev/urandom >source.img'
host run "blockmux copy --overwrite --verify file:source.img '$open'"
host run "blockmux copy --overwrite '$open&connections=1' file:back.img"
host run "cmp source.img back.img"

check crcs_are_negotiated
host run "blockmux bench '$open&crc=on' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

check the_bench_verifies_its_writes
host run "blockmux bench '$open' --rw randwrite --bs 64k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

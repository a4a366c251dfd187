# Our iSER initiator against LIO's isert over siw: the kernel's target, which is in the guest here.
. /lib.sh
. /siw.inc
modprobe -a ib_isert target_core_file iscsi_target_mod
mount -t configfs none /sys/kernel/config
lio=/sys/kernel/config/target
# LIO warns about missing modules and the missing GET LBA STATUS, and siw about disconnected peers.
unimportant='db_root: cannot open|Unable to load target_core_|Unable to locate key|Unsupported SA: 0x12|siw: '

# A disk of 400 MiB in memory.
mount -t tmpfs -o size=402m tmpfs /mnt
truncate -s 400M /mnt/disk
mkdir -p $lio/core/fileio_0/disk
echo "fd_dev_name=/mnt/disk,fd_dev_size=$((400 << 20))" >$lio/core/fileio_0/disk/control
echo lio0 >$lio/core/fileio_0/disk/wwn/vpd_unit_serial
echo 1 >$lio/core/fileio_0/disk/enable
tpg=$lio/iscsi/iqn.2026-11.test:open/tpgt_1
mkdir -p "$tpg/lun/lun_0"
# A portal also listens on TCP, and siw uses the TCP port of the same number, so they are in different networks.
unshare -n sh -exc "mkdir $tpg/np/0.0.0.0:3260"
ln -s $lio/core/fileio_0/disk "$tpg/lun/lun_0/disk"
echo 1 >"$tpg/np/0.0.0.0:3260/iser"
echo 1 >"$tpg/attrib/generate_node_acls"
echo 1 >"$tpg/attrib/cache_dynamic_acls"
echo 0 >"$tpg/attrib/demo_mode_write_protect"
echo 0 >"$tpg/attrib/authentication"
echo 1 >"$tpg/enable"
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

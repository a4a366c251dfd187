# iSER over siw, Linux's software iWARP: the kernel's initiator against `blockmux serve`.
. /lib.sh
. /open-iscsi.inc
. /siw.inc
modprobe ib_iser

# serve_disk: serves a file, so that its data survives a killed target.
serve_disk() {
  host run "cat >blockmux.toml <<END
    [[volume]]
    name = 'disk'
    spec = 'file:disk.img?size=192m'
    [[iscsi_target]]
    TargetName = 'iqn.2026-11.test:open'
    luns = { 0 = 'disk' }
END"
  serve "--config blockmux.toml --iscsi $HOST:3260"
}
serve_disk

check an_nvme_rdma_host_is_rejected_immediately
modprobe nvme_rdma
id=00000000-0000-4000-8000-000000000001
fails nvme connect -t rdma -a $target -s 3260 -n nqn.2026-11.test:none \
  --hostid=$id --hostnqn=nqn.2014-08.org.nvmexpress:uuid:$id
# siw reports every reject as a reset and drops its private data.
dmesg | grep 'Connect rejected: status -104'
no_kernel_warnings 'Connect rejected'

over_iser() { iscsiadm -m node -T iqn.2026-11.test:open -p $target "$@"; }

check the_kernel_logs_in_over_iwarp
over_iser -o new -I iser
over_iser -o update -n node.session.timeo.replacement_timeout -v 60
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
disk=$(iscsi_disk open 0)

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check io_continues_after_the_target_is_killed_and_restarted
begin_io "$disk"
sees_writes "$disk"
host kill target
within 60 grep FAILED /sys/class/iscsi_session/session1/state
serve_disk
within 60 grep LOGGED_IN /sys/class/iscsi_session/session1/state
sees_writes "$disk"
end_io
no_kernel_warnings .     # Linux logs every lost connection

check the_same_port_also_serves_iscsi
iscsiadm -m discovery -t sendtargets -p "$HOST"
node open --login
verified_io "$(iscsi_disk open 0 2)" --size=4m
verified_io "$disk" --size=4m
node open --logout
over_iser --logout
host stop target

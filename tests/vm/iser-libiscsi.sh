# libiscsi's conformance suite over iSER: its own iSER over siw in the guest, against `blockmux serve`.
. /lib.sh
. /siw.inc
modprobe rdma_ucm
kernel_is_content

host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'disk'
  spec = 'mem:64m'
  [[iscsi_target]]
  TargetName = 'iqn.2026-11.test:open'
  luns = { 0 = 'disk' }
END"
serve "--config blockmux.toml --iscsi $HOST:3260"
within 10 test -e /dev/infiniband/uverbs0
within 10 test -e /dev/infiniband/rdma_cm

# suite NAME: all tests of that name.
suite() { iscsi-test-cu --dataloss --allow-sanitize --test "$1" "iser://$target/iqn.2026-11.test:open/0"; }

check libiscsi_logs_in_over_iwarp
suite SCSI.TestUnitReady

# Of its suite, what has no data-out: libiscsi says in the PDU that immediate data follows, and then sends none, which is no
# message that could be understood.
check what_reads_and_asks_passes_over_iser
for name in Inquiry ReadCapacity10 ReadCapacity16 Read6 Read10 Read12 Read16 ReportSupportedOpcodes Verify10 Verify16; do
  suite "SCSI.$name"
done

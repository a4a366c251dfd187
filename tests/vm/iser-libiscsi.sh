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

# Of its suite, what libiscsi itself can over iSER. Of a write it says in the PDU that immediate data follows, and sends none,
# which is no message that could be understood; and of a read that ends early it takes all the room for data.
check what_asks_about_the_unit_passes_over_iser
for name in Standard EVPD MandatoryVPDSBC SupportedVPD VersionDescriptors; do
  suite "SCSI.Inquiry.$name"
done

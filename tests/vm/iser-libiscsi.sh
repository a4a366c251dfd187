# libiscsi's conformance suite over iSER: its own iSER over siw in the guest, against `blockmux serve`.
. /lib.sh
. /siw.inc
modprobe rdma_ucm
no_kernel_warnings

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

# suite NAME: runs all tests of that name.
suite() { iscsi-test-cu --dataloss --allow-sanitize --test "$1" "iser://$target/iqn.2026-11.test:open/0"; }

check libiscsi_logs_in_over_iwarp
suite SCSI.TestUnitReady

# Only the tests that libiscsi itself supports over iSER. For a write libiscsi announces immediate data in the PDU and sends none,
# which is an invalid message; for a short read it returns the whole buffer as data.
check tests_that_query_the_unit_pass_over_iser
for name in Standard EVPD MandatoryVPDSBC SupportedVPD VersionDescriptors; do
  suite "SCSI.Inquiry.$name"
done

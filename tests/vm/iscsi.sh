# The kernel's iSCSI initiator, open-iscsi, against `blockmux serve --iscsi`.
. /lib.sh
. /open-iscsi.inc

host run 'umask 77
  echo initiator-secret >own
  echo the-targets-secret >targets
  cat >blockmux.toml' "<<END
    [[volume]]
    name = 'ram'
    spec = 'mem:512m'
    [[volume]]
    name = 'file'
    spec = 'file:disk.img?size=384m'
    protocols = ['iscsi', 'iqn.2026-11.test:open']
    [[volume]]
    name = 'large'
    spec = 'mem:384m?block_size=4096'
    protocols = ['iqn.2026-11.test:blocks']
    [[volume]]
    name = 'part'
    spec = 'slice:1m,384m:file:parts.img?size=400m&physical_block_size=4096'
    protocols = ['iqn.2026-11.test:blocks']
    [[iscsi_target]]
    TargetName = 'iqn.2026-11.test:guarded'
    luns = { 0 = 'ram', 5 = 'file' }
    HeaderDigest = 'CRC32C'
    DataDigest = 'CRC32C'
    [[iscsi_target.acl]]
    InitiatorName = '$INITIATOR'
    CHAP_N = 'initiator'
    secret_file = 'own'
    target_CHAP_N = 'target'
    target_secret_file = 'targets'
    [[iscsi_target]]
    TargetName = 'iqn.2026-11.test:open'
    luns = { 0 = 'file' }
    [[iscsi_target]]
    TargetName = 'iqn.2026-11.test:blocks'
    luns = { 0 = 'large', 1 = 'part' }
END"
serve "--config blockmux.toml --iscsi $HOST:3260 --control unix:control"

check discovery_names_the_targets
iscsiadm -m discovery -t sendtargets -p "$HOST" | sort >found
for name in blocks guarded open; do echo "$HOST:3260,1 iqn.2026-11.test:$name"; done | diff - found

check an_initiator_without_the_secrets_is_refused
fails node guarded --login
set_up guarded node.session.auth.authmethod CHAP
set_up guarded node.session.auth.username initiator
set_up guarded node.session.auth.password another-secret
fails node guarded --login
set_up guarded node.session.auth.password initiator-secret
set_up guarded node.session.auth.username_in target
set_up guarded node.session.auth.password_in another-secret
fails node guarded --login
fails iscsiadm -m session

check both_sides_authenticate_and_negotiate_digests
set_up guarded node.session.auth.password_in the-targets-secret
set_up guarded 'node.conn[0].iscsi.HeaderDigest' CRC32C,None
set_up guarded 'node.conn[0].iscsi.DataDigest' CRC32C,None
node guarded --login
iscsiadm -m session -P 2 >session
grep 'HeaderDigest: CRC32C' session
grep 'DataDigest: CRC32C' session
disk=$(iscsi_disk guarded 0)
test "$(cat "/sys/block/${disk#/dev/}/size")" = 1048576
test "$(cat "/sys/block/${disk#/dev/}/device/vendor")" = 'BLOCKMUX'

check an_xfs_file_system_keeps_its_files
file_system xfs "$disk"

check an_ext4_file_system_keeps_its_files
file_system ext4 "$disk"

check fio_verifies_its_writes
verified_io "$disk"

check a_discard_deallocates_blocks_of_the_file
file=$(iscsi_disk guarded 5)
dd if=/dev/urandom of="$file" bs=1M count=16 oflag=direct
host run 'test $(du --block-size=1M disk.img | cut -f 1) -ge 16'
blkdiscard "$file"
host run 'test $(du --block-size=1M disk.img | cut -f 1) -lt 2'
is_zero "$file" 16

check a_resize_while_served_is_reported_and_visible
sectors() { cat "/sys/block/${file#/dev/}/size"; }
has_said() { dmesg | grep "$1"; }
host run 'blockmux ctl control resize file 448m'
dd if="$file" of=/dev/null bs=4k count=1 iflag=direct
within 10 has_said 'Capacity data has changed'
echo 1 >"/sys/block/${file#/dev/}/device/rescan"
test "$(sectors)" = $((448 << 11))
verified_io "$file" --offset=400m
host run 'blockmux ctl control resize file 384m --shrink'
dd if="$file" of=/dev/null bs=4k count=1 iflag=direct
echo 1 >"/sys/block/${file#/dev/}/device/rescan"
test "$(sectors)" = $((384 << 11))
no_kernel_warnings 'Capacity data has changed'

check a_logout_ends_the_session
node guarded --logout
fails iscsiadm -m session
test ! -b "$disk"

check several_sessions_see_the_same_disk
set_up open node.session.nr_sessions 3
node open --login
test "$(iscsiadm -m session | wc -l)" = 3
jobs=
for nth in 1 2 3; do
  verified_io "$(iscsi_disk open 0 $nth)" --offset=$((nth * 64))m &
  jobs="$jobs $!"
done
for job in $jobs; do wait "$job"; done
dd if=/dev/urandom of=random bs=1M count=4
dd if=random of="$(iscsi_disk open 0 1)" bs=1M oflag=direct
dd if="$(iscsi_disk open 0 3)" bs=1M count=4 iflag=direct | cmp - random
node open --logout

check a_4kn_disk_and_a_512e_slice_have_file_systems
node blocks --login
queue() { cat "/sys/block/${1#/dev/}/queue/$2"; }
large=$(iscsi_disk blocks 0)
test "$(queue "$large" logical_block_size)" = 4096
test "$(queue "$large" physical_block_size)" = 4096
test "$(cat "/sys/block/${large#/dev/}/size")" = $((384 << 11))
file_system xfs "$large"
verified_io "$large"
part=$(iscsi_disk blocks 1)
test "$(queue "$part" logical_block_size)" = 512
test "$(queue "$part" physical_block_size)" = 4096
file_system ext4 "$part"
host run 'test "$(head -c 1048576 parts.img | tr -d "\0" | wc -c)" = 0'
node blocks --logout

check the_daemon_stops_on_sigterm
host stop target

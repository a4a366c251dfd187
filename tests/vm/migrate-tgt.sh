# A disk of tgt moves to Blockmux by `blockmux import`. What Linux, and udev's rules, name it by stays, and so does its file system.
. /lib.sh
. /open-iscsi.inc

name=iqn.2026-11.test:moves
host run "truncate -s 384M named.img numbered.img
cat >targets.conf" "<<END
<target $name>
  controller_tid 3
  incominguser initiator initiator-secret
  <backing-store \$PWD/named.img>
    vendor_id ACME
    product_id Disk
    product_rev 7
    scsi_sn serial-0001
    scsi_id IET-named-0001
    lun 1
  </backing-store>
  <backing-store \$PWD/numbered.img>
    lun 2
  </backing-store>
</target>
END"

serve_with_tgt() {
  host start tgt "tgtd -f -C 77 --iscsi portal=$HOST:3260"
  host run 'timeout 60 sh -c "until tgtadm -C 77 --op show --mode sys; do sleep 0.1; done"'
  host run 'tgt-admin -C 77 -c targets.conf --execute'
}

# log_in: finds the target and logs in.
log_in() {
  iscsiadm -m discovery -t sendtargets -p "$HOST"
  set_up moves node.session.auth.authmethod CHAP
  set_up moves node.session.auth.username initiator
  set_up moves node.session.auth.password initiator-secret
  node moves --login
}

# identity LUN: what a disk is named by: its wwid, which multipath uses, and what udev's rules for sg3-utils read. There are also
# designators of the port, and tgt has a second NAA designator, which contains the target's number.
identity() {
  disk=$(iscsi_disk moves "$1")
  device=/sys/block/${disk#/dev/}/device
  cat "$device/wwid" "$device/vendor" "$device/model" "$device/rev"
  sg_inq --export --page=sn "$disk"
  sg_inq --export --page=di "$disk" | grep IDENT_LUN | grep -v NAA_LOCAL | sort
}

check linux_names_the_disks_of_tgt
serve_with_tgt
log_in
for lun in 1 2; do identity $lun >before.$lun; cat before.$lun; done
grep serial-0001 before.1
file_system xfs "$(iscsi_disk moves 1)"
node moves --logout
host kill tgt    # it does not end on SIGTERM while it has targets

check the_disks_keep_their_names_and_files_when_blockmux_serves_them
# The address was an option of tgtd. QEMU listens at another one of this machine.
host run 'blockmux import targets.conf --output moved/ && sed -i "s/0\.0\.0\.0:/$HOST:/" moved/blockmux.toml
  blockmux check moved/blockmux.toml'
serve "--config moved/blockmux.toml"
log_in
for lun in 1 2; do identity $lun | diff before.$lun -; done
mount -t xfs "$(iscsi_disk moves 1)" /mnt
diff -r /usr/lib/modules /mnt/modules
umount /mnt
node moves --logout

check they_keep_them_on_the_way_back
host stop target
serve_with_tgt
log_in
for lun in 1 2; do identity $lun | diff before.$lun -; done
node moves --logout
host kill tgt

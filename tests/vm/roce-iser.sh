# iSER over software RoCEv2 against Linux's initiator over rxe. Blockmux runs in the guest.
. /lib.sh
. /open-iscsi.inc
. /rxe.inc
. /roce-storage.inc
modprobe ib_iser
serve_disk
over_iser() { iscsiadm -m node -T $iqn -p $our_ipv4 "$@"; }

check linux_logs_in_to_iser_over_rocev2
over_iser -o new -I iser
over_iser -o update -n node.session.timeo.replacement_timeout -v 60
over_iser --login
iscsiadm -m session -P 1 >session
grep 'Iface Transport: iser' session
disk=$(disk_of disk 0)

check fio_verifies_its_writes_by_iser
verified_io "$disk" --size=8m

over_iser --logout
kill_server

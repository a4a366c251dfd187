# The kernel's initiators of iSCSI, NVMe/TCP and NBD while another process takes over from `blockmux serve`. Checks that no I/O
# fails and no acknowledged write is lost, and prints how long the longest write took.
. /lib.sh
. /open-iscsi.inc
. /nvme.inc
modprobe nvme-core multipath=N
modprobe nvme-tcp
modprobe nbd
mkdir -p /var/run

# serve_next NAME: starts a daemon that takes over from the running one, if there is one.
serve_next() {
  host start "$1" "blockmux serve --config blockmux.toml --state state --control unix:control --takeover unix:control \
    --iscsi $HOST:3260 --nvme-tcp $HOST:4420 --nbd $HOST:10809"
  host until "$1" ready
}
# take_over: starts the next daemon, and waits until the previous one has ended with status 0.
served=0
take_over() {
  serve_next "daemon$((served + 1))"
  host wait "daemon$served"
  served=$((served + 1))
}

host run "mkdir -m 700 state
cat >blockmux.toml <<END
  [[volume]]
  name = 'iscsi'
  spec = 'file:iscsi.img?size=64m'
  [[volume]]
  name = 'nvme'
  spec = 'file:nvme.img?size=64m'
  [[volume]]
  name = 'nbd'
  spec = 'file:nbd.img?size=64m'
  [[iscsi_target]]
  TargetName = 'iqn.2026-11.test:open'
  luns = { 0 = 'iscsi' }
  [[nvme_subsystem]]
  nqn = '$NQN'
  namespaces = { 1 = 'nvme' }
END"
serve_next daemon0

# measured NAME DEVICE COMMAND: fio writes a pattern at random while COMMAND runs, then reads it back; prints the longest write.
measured() {
  name=$1 device=$2
  shift 2
  fio --name=io --filename="$device" --direct=1 --ioengine=libaio --iodepth=4 --rw=randwrite --bs=4k --size=16m \
    --rate=,400k --clocksource=clock_gettime --verify=crc32c --verify_fatal=1 --output-format=terse --terse-version=3 \
    --output=measured.fio --eta=never &
  io=$!
  sees_writes "$device"
  "$@"
  sees_writes "$device"
  wait $io
  echo "longest write of $name: $(cut -d ';' -f 56 measured.fio) us"
}
nothing() { :; }

check an_iscsi_initiator_reconnects_after_a_pause
iscsiadm -m discovery -t sendtargets -p "$HOST"
set_up open node.session.timeo.replacement_timeout 60
node open --login
within 60 has_iscsi_disk open 0
disk=/dev/$disk_name
measured 'iSCSI, no takeover' "$disk" nothing
measured 'iSCSI, takeover' "$disk" take_over
no_kernel_warnings 'detected conn error|session recovery|connection[0-9]+:0'

check a_reservation_survives_a_takeover
sg_persist --out --register --param-sark=1 "$disk"
sg_persist --out --reserve --param-rk=1 --prout-type=3 "$disk"
sg_persist --in --read-reservation "$disk" >before
take_over
within 60 grep LOGGED_IN /sys/class/iscsi_session/session1/state
# The first command of the new session gets its unit attention.
sg_persist --in --read-reservation "$disk" || true
sg_persist --in --read-reservation "$disk" >after
cmp before after
sg_persist --out --clear --param-rk=1 "$disk"
node open --logout
no_kernel_warnings 'detected conn error|session recovery|connection[0-9]+:0'

check an_nvme_host_reconnects_after_a_pause
# The kernel reconnects after 1 s; its default is 10 s.
connect 1 --nr-io-queues=2 --reconnect-delay=1
disk=$(disk_of $controller 1)
measured 'NVMe/TCP, no takeover' "$disk" nothing
measured 'NVMe/TCP, takeover' "$disk" take_over
disconnect $controller
no_kernel_warnings .

check an_nbd_client_with_several_connections_keeps_them
nbd-client "$HOST" /dev/nbd0 -N nbd -connections 4 -timeout 10
measured 'NBD, no takeover' /dev/nbd0 nothing
measured 'NBD, takeover' /dev/nbd0 take_over
mkfs.ext4 -q -F /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt
dd if=/dev/urandom of=random bs=1M count=4
cp random /mnt
take_over
sync -f /mnt/random
umount /mnt
e2fsck -f -n /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt
cmp random /mnt/random
umount /mnt
nbd-client -d /dev/nbd0
no_kernel_warnings 'shutting down sockets'
host stop "daemon$served"

# A user other than root attaches volumes by ublk. udev does not run in the guest: its part is played by a loop.
. /lib.sh
. /ublk.inc
mkdir -p /var/run
modprobe ublk_drv
is_ready() { grep -q '^/dev/ublkb' ready; }

check a_user_other_than_root_attaches_a_volume
echo user:x:1000:1000::/:/bin/sh >>/etc/passwd
as_user() { su -c 'exec "$0" "$@"' user -- "$@"; }
mkdir -p users
chown 1000:1000 users
fails as_user blockmux attach mem:64m --via ublk 2>said
grep 'cannot use /dev/ublk-control: Permission denied' said
chmod 666 /dev/ublk-control
# udev's part.
: >owns_disks
while [ -e owns_disks ]; do
  for node in /dev/ublk[bc]*; do
    owner=$(blockmux attach --owner "$node") || continue
    chown "${owner% *}:${owner#* }" "$node" || true     # it may have gone
  done
  sleep 0.2
done >/dev/null 2>&1 &
owning=$!
truncate -s 96M users/disk.img
chown 1000:1000 users/disk.img
for volume in mem:96m file:users/disk.img; do
  as_user blockmux attach "$volume" --run 'exec fio --name=io --filename=$device --direct=1 --rw=randrw --bsrange=4k-256k \
    --ioengine=libaio --iodepth=16 --size=24m --verify=crc32c --verify_fatal=1 --eta=never --output=users/fio' ||
    { cat users/fio; false; }
done
as_user blockmux attach --read-only file:users/disk.img --run '! dd if=/dev/zero of=$device bs=4k count=1 oflag=direct'
# A killed process takes its disk along.
su user -c 'exec blockmux attach file:users/disk.img' >ready 2>attach.log &
attached=$!
within 60 is_ready
disk=$(cut -d ' ' -f 1 ready)
kill -9 $attached
fails wait $attached
within 20 test ! -e "$disk"
as_user blockmux attach file:users/disk.img --run 'mkfs.ext4 -q -F $device && e2fsck -f -n $device'
rm owns_disks
wait $owning
chmod 600 /dev/ublk-control

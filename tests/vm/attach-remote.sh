# Remote volumes as disks of the guest by ublk, over protocols whose initiators its kernel lacks or has. Blockmux runs in the
# guest and on the host.
. /lib.sh
. /ublk.inc
. /attach.inc
unimportant='Power-on or device reset occurred'
mkdir -p /var/run
modprobe ublk_drv

port_id=0x11111111111111112222222222222222
host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'disk'
  spec = 'file:disk.img?size=384m'
  [[srp_target]]
  port_id = '$port_id'
  luns = { 0 = 'disk' }
END"
serve_disk() {
  serve "--config blockmux.toml --nbd $HOST:10809 --iscsi $HOST:3260 --nvme-tcp $HOST:4420 --srp $HOST:3261"
}

# url_of SCHEME: the URL of the disk.
url_of() { blockmux discover "$1://$HOST" | grep -o "$1://[^ ']*disk[^ ']*" | head -n 1; }

# serves_a_file_system URL: XFS and its files; fio's content while the server and the process of the disk are killed.
serves_a_file_system() {
  attach "$1"
  file_system xfs "$disk"
  begin_io "$disk"
  sees_writes "$disk"
  host kill target
  serve_disk
  sees_writes "$disk"
  crash
  attach "$1"
  grep ', recovered$' ready
  sees_writes "$disk"
  end_io
  detach
}

serve_disk
for protocol in nbd nvme_tcp iscsi srp; do
  check "a_volume_over_${protocol}_keeps_its_files_when_the_server_and_the_process_are_killed"
  case $protocol in
    nbd) url=nbd://$HOST/disk ;;
    nvme_tcp) url=$(url_of nvme+tcp) ;;
    iscsi) url=$(url_of iscsi) ;;
    srp) url="srp://$HOST:3261/$port_id/0?rdma=iwarp" ;;
  esac
  serves_a_file_system "$url"
done
host kill target

check a_file_system_whose_volume_shrinks_gets_errors_and_its_other_files_stay
truncate -s 128M small.img
attach file:small.img
mkfs.ext4 -q -F "$disk"
mount -t ext4 "$disk" /mnt
mkdir /mnt/kept
cp /usr/bin/blockmux /mnt/kept/
sync
truncate -s 64M small.img
fails dd if="$disk" of=/dev/null bs=1M skip=100 count=1 iflag=direct
fails dd if=/dev/zero of="$disk" bs=1M seek=100 count=1 oflag=direct
cmp /usr/bin/blockmux /mnt/kept/blockmux
grep 'small.img: another program has truncated it to 67108864 bytes' attach.log
truncate -s 128M small.img
umount /mnt
detach
attach file:small.img
e2fsck -f -n "$disk"
detach
no_kernel_warnings 'critical medium error|EXT4'

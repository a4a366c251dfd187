# The kernel's NVMe/TCP host comes to `blockmux serve --nvme-tcp` by TLS, and our initiator to the kernel's target. tlshd
# does the handshakes for the kernel; the keys are derived here by OpenSSL.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
modprobe -a tls nvme-tcp nvmet-tcp

# Two configured keys, as nvme-cli has them, and their bytes.
KEY_256=NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:
BYTES_256=5512dbb6737d0106f65975b773dfb011ffc344bcf442e2dd6d8bc4870b5d5b03
KEY_384=NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:
BYTES_384=${BYTES_256}ffc344bcf442e2dd6d8bc4870b5d5b03

hex() { printf %s "$1" | od -An -v -tx1 | tr -d ' \n'; }

# expand DIGEST LENGTH KEY LABEL CONTEXT: HKDF with the label of TLS 1.3; hexadecimal.
expand() {
  label="tls13 $4"
  info=$(printf '%04x%02x' "$2" ${#label})$(hex "$label")$(printf %02x ${#5})$(hex "$5")
  openssl kdf -keylen "$2" -kdfopt digest:"$1" -kdfopt hexkey:"$3" -kdfopt hexinfo:"$info" HKDF | tr -d ':\n'
}

# add_key HOST 01|02: the key of version 0 for a host, for the kernel.
add_key() {
  case $2 in
    01) set -- "$1" "$2" SHA256 32 $BYTES_256 ;;
    02) set -- "$1" "$2" SHA384 48 $BYTES_384 ;;
  esac
  identity="NVMe0R$2 $(name_of "$1") $NQN"
  retained=$(expand "$3" "$4" "$5" HostNQN "$(name_of "$1")")
  expand "$3" "$4" "$retained" nvme-tls-psk "$identity" | xxd -r -p | keyctl padd psk "$identity" %:.nvme
}

printf '[debug]\nloglevel=0\ntls=0\nnl=0\n[authenticate]\nkeyrings=.nvme\n' >/etc/tlshd.conf
tlshd -s -c /etc/tlshd.conf >tlshd.log 2>&1 &
add_key 1 01
add_key 2 02
host run "umask 77
  echo '$KEY_256' >key.256
  echo '$KEY_384' >key.384"
host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'disk'
  spec = 'mem:64m'
  [[nvme_subsystem]]
  nqn = '$NQN'
  namespaces = { 1 = 'disk' }
  hosts = ['$(name_of 3)']
  [[nvme_subsystem.host]]
  hostnqn = '$(name_of 1)'
  tls_key_file = 'key.256'
  [[nvme_subsystem.host]]
  hostnqn = '$(name_of 2)'
  tls_key_file = 'key.384'
END"
serve "--config blockmux.toml --nvme-tcp $HOST:4420"

check linux_comes_by_tls_with_either_hash
for nth in 1 2; do
  connect $nth --tls --nr-io-queues=2
  test -n "$(cat /sys/class/nvme/$controller/tls_key)"
  verified_io "$(disk_of $controller 1)"
  disconnect $controller
done
kernel_is_content .

check a_host_with_a_key_does_not_come_without_tls_and_others_do
fails try_to_connect 1
connect 3 --nr-io-queues=1
disconnect $controller
kernel_is_content .

check what_was_written_by_tls_is_read_by_tls
connect 1 --tls --nr-io-queues=2
file_system ext4 "$(disk_of $controller 1)"
disconnect $controller
host stop target

# A disk in memory, of 32 MiB, served by the kernel.
mount -t configfs none /sys/kernel/config
nvmet=/sys/kernel/config/nvmet
truncate -s 32M disk
subsystem=$nvmet/subsystems/$NQN
mkdir "$subsystem"
echo 1 >"$subsystem/attr_allow_any_host"
mkdir "$subsystem/namespaces/1"
printf %s "$PWD/disk" >"$subsystem/namespaces/1/device_path"
echo 1 >"$subsystem/namespaces/1/buffered_io"
echo 1 >"$subsystem/namespaces/1/enable"
port=$nvmet/ports/1
mkdir "$port"
echo ipv4 >"$port/addr_adrfam"
echo tcp >"$port/addr_trtype"
echo "$GUEST" >"$port/addr_traddr"
echo 4420 >"$port/addr_trsvcid"
echo tls1.3 >"$port/addr_tsas"
echo required >"$port/addr_treq"
ln -s "$subsystem" "$port/subsystems/$NQN"
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'

check we_come_to_linux_by_tls_with_either_hash
for nth in 1 2; do
  case $nth in 1) file=key.256 ;; 2) file=key.384 ;; esac
  url="nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of $nth)&tls_key_file=$file"
  host run "blockmux copy --verify file:source.img '$url'"
  host run "blockmux copy '$url' file:back.img && cmp source.img back.img"
done

check linux_refuses_us_without_a_key
fails host run "blockmux info 'nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&ctrl_loss_tmo=0'"
kernel_is_content .

# The kernel's NVMe/TCP host comes to `blockmux serve --nvme-tcp` by TLS, and our initiator to the kernel's target. tlshd
# does the handshakes for the kernel; the keys are derived here by OpenSSL. They are for SHA-256: GnuTLS learned after its
# version 3.7 to use others.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
modprobe -a tls nvme-tcp nvmet-tcp

# A configured key, as nvme-cli has it, and its bytes.
KEY=NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:
BYTES=5512dbb6737d0106f65975b773dfb011ffc344bcf442e2dd6d8bc4870b5d5b03

hex() { printf %s "$1" | od -An -v -tx1 | tr -d ' \n'; }

# expand KEY LABEL CONTEXT: HKDF with the label of TLS 1.3; hexadecimal.
expand() {
  label="tls13 $2"
  info=0020$(printf %02x ${#label})$(hex "$label")$(printf %02x ${#3})$(hex "$3")
  openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt hexkey:"$1" -kdfopt hexinfo:"$info" HKDF | tr -d ':\n'
}

# connect_by_tls HOST: nvme-cli learned that after the one that Debian 12 has.
connect_by_tls() {
  printf 'transport=tcp,traddr=%s,trsvcid=4420,nqn=%s,hostnqn=%s,hostid=%s,nr_io_queues=2,tls' \
    "$HOST" $NQN "$(name_of "$1")" "$(uuid_of "$1")" >/dev/nvme-fabrics
  find_controller "$1"
}

# add_key HOST: its key of version 0, for the kernel.
add_key() {
  identity="NVMe0R01 $(name_of "$1") $NQN"
  retained=$(expand $BYTES HostNQN "$(name_of "$1")")
  expand "$retained" nvme-tls-psk "$identity" | xxd -r -p | keyctl padd psk "$identity" %:.nvme
}

printf '[debug]\nloglevel=0\ntls=0\nnl=0\n[authenticate]\nkeyrings=.nvme\n' >/etc/tlshd.conf
tlshd -s -c /etc/tlshd.conf >tlshd.log 2>&1 &
add_key 1
host run "umask 77
  echo '$KEY' >key"
serve_disk "
  hosts = ['$(name_of 3)']
  [[nvme_subsystem.host]]
  hostnqn = '$(name_of 1)'
  tls_key_file = 'key'"

check linux_comes_by_tls
connect_by_tls 1
test -n "$(cat /sys/class/nvme/$controller/tls_key)"
verified_io "$(disk_of $controller 1)"
disconnect $controller
kernel_is_content .

check a_host_with_a_key_does_not_come_without_tls_and_others_do
fails try_to_connect 1
connect 3 --nr-io-queues=1
disconnect $controller
kernel_is_content .

check what_was_written_by_tls_is_read_by_tls
connect_by_tls 1
file_system ext4 "$(disk_of $controller 1)"
disconnect $controller
host stop target

secured=yes
. /nvmet.inc
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'

check we_come_to_linux_by_tls
url="nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&tls_key_file=key&tls_identity=0"
host run "blockmux copy --verify file:source.img '$url'"
host run "blockmux copy '$url' file:back.img && cmp source.img back.img"
host run "blockmux bench '$url' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"

check linux_refuses_us_without_a_key
fails host run "blockmux info 'nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&ctrl_loss_tmo=0'"
kernel_is_content .

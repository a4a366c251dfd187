# Blockmux in the guest, with kTLS: Linux's host with our target, our initiator with Linux's target, and OpenSSL for cases
# that neither produces.
. /lib.sh
. /nvme.inc
. /ktls.inc
. /tlshd.inc

# connect_with_openssl: opens a connection to our target as host 1. Standard input is sent as data; a line that begins with `k`
# makes OpenSSL update its key instead.
connect_with_openssl() {
  timeout 60 openssl s_client -tls1_3 -connect 127.0.0.1:4420 -psk_identity "$(identity_of 1)" \
    -psk "$(psk_of 1)" >openssl.log 2>&1
}
is_by_kernel() { within 20 grep 'records are processed by the kernel' target.log; }

size=64m
serve_with_tls "$KEY"

check linux_connects_to_a_target_with_ktls
connect_with_tls 1 127.0.0.1
test -n "$(cat /sys/class/nvme/$controller/tls_key)"
verified_io "$(disk_of $controller 1)"
file_system ext4 "$(disk_of $controller 1)"
# Three queues, at both ends.
test "$(counted TlsTxSw)" = 6
test "$(grep -c 'records are processed by the kernel' target.log)" = 3
disconnect $controller
stop_serving
no_kernel_warnings .
all_is_opened

check a_key_update_ends_the_connection_with_a_message
serve_with_tls "$KEY"
is_refused() { grep 'the peer has updated its TLS key, and the kernel accepts no other' target.log; }
{
  is_by_kernel
  echo k
  for _ in 1 2 3 4 5 6 7 8; do
    sleep 1
    is_refused || echo more
  done
} | connect_with_openssl || true
is_refused
stop_serving
all_is_opened

check a_close_notify_alert_ends_the_connection
serve_with_tls "$KEY"
# OpenSSL closes the connection with close_notify at the end of its input.
is_by_kernel | connect_with_openssl
within 20 grep 'connection closed' target.log
fails grep WARN target.log
stop_serving
all_is_opened

secured=yes
. /nvmet.inc

check our_initiator_connects_to_linux_with_ktls
dd if=/dev/urandom of=source.img bs=1M count=8
truncate -s 32M source.img
url="nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&tls_key_file=key&tls_identity=0"
before=$(counted TlsTxSw)
blockmux -vv copy --verify file:source.img "$url" 2>copy.log
grep 'records are processed by the kernel' copy.log
# There are more kTLS connections than those of the target.
test $(($(counted TlsTxSw) - before)) -gt "$(grep -c 'records are processed by the kernel' copy.log)"
blockmux copy --overwrite "$url" file:back.img
cmp source.img back.img
blockmux bench "$url" --rw randwrite --bs 16k --iodepth 16 --size 16m --verify crc32c --runs 1 --no_ceiling
# The kernel logs the end of each connection.
no_kernel_warnings 'TLS Alert desc 0'
all_is_opened

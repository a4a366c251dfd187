# Blockmux at both ends in the guest, over NVMe/TCP with TLS and kTLS.
. /lib.sh
. /nvme.inc
. /ktls.inc

KEY_384=NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:
dd if=/dev/urandom of=source.img bs=1M count=10
truncate -s 16M source.img

# moved_by URL: copies a volume to the target and back and compares, then verifies random writes.
moved_by() {
  rm -f back.img
  blockmux copy --overwrite --verify file:source.img "$1"
  blockmux copy --overwrite "$1" file:back.img
  cmp source.img back.img
  blockmux bench "$1" --rw randwrite --bs 16k --size 8m --iodepth 16 --verify crc32c --runs 1 --no_ceiling
}

check without_kernel_support_the_library_handles_all_records
echo /bin/false >/proc/sys/kernel/modprobe
serve_with_tls "$KEY"
moved_by "$url"
grep 'records are processed in user space; the kernel does not support kTLS' target.log
stop_serving
fails test -e /proc/net/tls_stat
echo /sbin/modprobe >/proc/sys/kernel/modprobe

check both_ends_use_ktls_with_aes_128
serve_with_tls "$KEY"
moved_by "$url"
moved_by "$url&hdr_digest=on&data_digest=on"
# Both ends have the same number of connections.
test "$(counted TlsTxSw)" -ge 8
test "$(counted TlsTxSw)" = "$(counted TlsRxSw)"
grep 'records are processed by the kernel' target.log
stop_serving
all_is_opened

check both_ends_use_ktls_with_aes_256
before=$(counted TlsTxSw)
serve_with_tls "$KEY_384"
moved_by "$url"
test "$(counted TlsTxSw)" -gt "$before"
stop_serving
all_is_opened

check ktls_at_one_end_works_with_the_library_at_the_other
serve_with_tls "$KEY"
before=$(counted TlsTxSw)
moved_by "$url&ktls=off"
# Only the target's connections use kTLS.
of_target=$(($(counted TlsTxSw) - before))
before=$(counted TlsTxSw)
moved_by "$url"
test "$of_target" -gt 0
test $(($(counted TlsTxSw) - before)) -gt "$of_target"
stop_serving
serve_with_tls "$KEY" 'nvme_tcp_ktls = false'
before=$(counted TlsTxSw)
moved_by "$url&ktls=off"
test "$(counted TlsTxSw)" = "$before"
moved_by "$url"
test "$(counted TlsTxSw)" -gt "$before"
stop_serving
all_is_opened

check nbd_uses_ktls_after_starttls
(umask 77 && echo alice:058f48cec0b4a048af64d9f8ac88fe6649eafeb713db50cf6d5437004d8de4ab >keys.psk)
blockmux -vv serve disk=mem:$size --nbd 127.0.0.1:10809 --nbd-tls-psk keys.psk >target.log 2>&1 &
target=$!
within 30 grep ready target.log
url='nbds://alice@127.0.0.1/disk?tls-psk-file=keys.psk'
before=$(counted TlsTxSw)
moved_by "$url&ktls=off"
of_target=$(($(counted TlsTxSw) - before))
before=$(counted TlsTxSw)
moved_by "$url"
test "$of_target" -gt 0
test $(($(counted TlsTxSw) - before)) -gt "$of_target"
grep 'records are processed by the kernel' target.log
stop_serving
all_is_opened

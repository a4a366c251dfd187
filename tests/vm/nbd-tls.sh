# The kernel's NBD client over TLS, which nbd-client's proxy speaks for it, and an encrypted disk over that.
. /lib.sh
unimportant='shutting down sockets|CONFIG_IMA_DISABLE_HTABLE'
modprobe nbd
modprobe dm-crypt
mkdir -p /var/run /run/cryptsetup

check certificates_are_made
cat >openssl.cnf <<END
[req]
distinguished_name = name
[name]
END
# signed NAME SUBJECT [EXTENSION]: makes NAME-key.pem and NAME-cert.pem.
signed() {
  openssl req -config openssl.cnf -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1-key.pem" -subj "$2" -out request
  echo "${3-basicConstraints=CA:FALSE}" >extensions
  openssl x509 -req -in request -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -extfile extensions -days 2 -out "$1-cert.pem"
}
openssl req -config openssl.cnf -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca-key.pem -subj /CN=authority \
  -addext basicConstraints=critical,CA:TRUE -days 2 -out ca-cert.pem
signed server /CN=storage subjectAltName=DNS:storage.example
signed client /CN=backup
signed stranger /CN=stranger
host run "umask 77
  mkdir certs
  cat >certs/ca-cert.pem <<END
$(cat ca-cert.pem)
END
  cat >certs/server-cert.pem <<END
$(cat server-cert.pem)
END
  cat >certs/server-key.pem <<END
$(cat server-key.pem)
END"

# connect CLIENT [OPTIONS]: connects /dev/nbd0 as CLIENT.
connect() {
  client=$1
  shift
  nbd-client "$HOST" /dev/nbd0 -N disk -x -tlshostname storage.example -cacertfile ca-cert.pem -certfile "$client-cert.pem" \
    -keyfile "$client-key.pem" -block-size 4096 "$@"
}
serve_over_tls() {
  serve "'disk=file:disk.img?size=384m&block_size=4096' --nbd $HOST:10809 --nbd-tls-certs certs --nbd-tls-subject CN=backup"
}
serve_over_tls

check only_the_allowed_client_connects
fails nbd-client "$HOST" /dev/nbd0 -N disk
fails connect stranger
connect client
test "$(cat /sys/block/nbd0/size)" = $((384 << 11))
test "$(cat /sys/block/nbd0/queue/logical_block_size)" = 4096

check fio_verifies_its_writes_over_tls
verified_io /dev/nbd0 --bsrange=4k-64k

# Quick to derive, because the guest is emulated.
check an_encrypted_disk_keeps_its_files
printf secret >key
cryptsetup luksFormat --batch-mode --type luks2 --sector-size 4096 --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file key /dev/nbd0
cryptsetup open --allow-discards --key-file key /dev/nbd0 plain
file_system ext4 /dev/mapper/plain
fstrim_and_check() {
  mount /dev/mapper/plain /mnt
  fstrim -v /mnt
  diff -r /usr/lib/modules /mnt/modules
  umount /mnt
}
fstrim_and_check
cryptsetup close plain
nbd-client -d /dev/nbd0
no_kernel_warnings

check its_files_are_there_after_a_restart_and_the_volume_holds_none_in_plain
host stop target
serve_over_tls
connect client
cryptsetup open --key-file key /dev/nbd0 plain
mount -o ro /dev/mapper/plain /mnt
diff -r /usr/lib/modules /mnt/modules
umount /mnt
cryptsetup close plain
nbd-client -d /dev/nbd0
host run 'test "$(head -c 4 disk.img)" = LUKS && ! grep -q modules.dep disk.img'
host stop target
no_kernel_warnings

# DH-HMAC-CHAP in both directions between our NVMe/TCP initiator and nvmet-tcp, the kernel's target.
. /lib.sh
. /nvme.inc
. /nvmet.inc
host run 'head -c 2M /dev/urandom >source.img
  truncate -s 32M source.img'
url="nvme+tcp://$GUEST/$NQN/1"

check both_sides_authenticate_with_every_hash_and_group
secret() { nvme gen-dhchap-key --hmac="$1" --key-length="$2" --nqn="$(name_of 1)"; }
targets=$(secret 3 64)
other=$(secret 1 32)
host run "umask 77
  echo '$targets' >targets
  echo '$other' >other"
own_host=$nvmet/hosts/$(name_of 1)
mkdir "$own_host"
echo 0 >"$subsystem/attr_allow_any_host"
ln -s "$own_host" "$subsystem/allowed_hosts/"
guarded="$url?hostnqn=$(name_of 1)&ctrl_loss_tmo=5"
for terms in '0 32 sha256 null' '1 32 sha384 ffdhe2048' '2 48 sha512 ffdhe3072' '3 64 sha256 ffdhe4096' \
  '1 32 sha384 ffdhe6144' '0 64 sha512 ffdhe8192'; do
  set -- $terms
  own=$(secret "$1" "$2")
  echo "$own" >"$own_host/dhchap_key"
  echo "hmac($3)" >"$own_host/dhchap_hash"
  echo "$4" >"$own_host/dhchap_dhgroup"
  host run "umask 77; echo '$own' >own"
  echo "$targets" >"$own_host/dhchap_ctrl_key"
  host run "blockmux info '$guarded&dhchap_secret_file=own'"
  host run "blockmux copy --overwrite file:source.img '$guarded&dhchap_secret_file=own&dhchap_ctrl_secret_file=targets'"
done

check an_initiator_reads_its_secret_again_when_the_kernel_rejects_the_old_one
echo ffdhe2048 >"$own_host/dhchap_dhgroup"
host start gateway "blockmux serve --nbd unix:gateway 'disk=${guarded%&*}&dhchap_secret_file=own'"
host until gateway ready
own=$(secret 1 32)
echo "$own" >"$own_host/dhchap_key"
ss -K sport = :4420
host start copy "blockmux copy --overwrite file:source.img 'nbd+unix:///disk?socket=gateway'"
has_rejected() { dmesg | grep 'host response mismatch'; }
within 60 has_rejected
host run "echo '$own' >own"
host wait copy
host stop gateway
no_kernel_warnings .     # nvmet logs each failed authentication

check a_failed_authentication_is_reported_and_an_impostor_is_disconnected
host run "! blockmux info '$guarded' 2>said; cat said; grep 'requires DH-HMAC-CHAP' said"
# Linux closes the connection at once, which may overtake its reason.
host run "! blockmux info '$guarded&dhchap_secret_file=other' 2>said; cat said; grep 'rejected this host.*check dhchap_secret_file' said"
host run "! blockmux info '$guarded&dhchap_secret_file=own&dhchap_ctrl_secret_file=other' 2>said; cat said
  grep 'controller failed to authenticate' said"
rm "$subsystem/allowed_hosts/$(name_of 1)"
echo 1 >"$subsystem/attr_allow_any_host"
rmdir "$own_host"
no_kernel_warnings .     # nvmet logs each failed authentication

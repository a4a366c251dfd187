# DH-HMAC-CHAP in both directions between the kernel's NVMe/TCP host and `blockmux serve --nvme-tcp`.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=N
modprobe nvme-tcp

own=$(nvme gen-dhchap-key --hmac=1 --nqn="$(name_of 1)")
plain=$(nvme gen-dhchap-key --hmac=0 --nqn="$(name_of 2)")
targets=$(nvme gen-dhchap-key --hmac=3 --key-length=64 --nqn=$NQN)
other=$(nvme gen-dhchap-key --hmac=2 --key-length=48 --nqn="$(name_of 1)")
host run "umask 77
  echo '$own' >own
  echo '$plain' >plain
  echo '$targets' >targets"

# serve_guarded HASH GROUP
serve_guarded() {
  serve_disk "
    [[nvme_subsystem.host]]
    hostnqn = '$(name_of 1)'
    dhchap_secret_file = 'own'
    dhchap_ctrl_secret_file = 'targets'
    dhchap_hash = 'hmac($1)'
    dhchap_dhgroup = '$2'
    [[nvme_subsystem.host]]
    hostnqn = '$(name_of 2)'
    dhchap_secret_file = 'plain'"
}

serve_guarded sha256 null

check a_host_without_the_secret_is_refused
fails try_to_connect 1
fails try_to_connect 1 --dhchap-secret="$other"
fails try_to_connect 3 --dhchap-secret="$own"
no_kernel_warnings .

check a_host_disconnects_from_a_target_that_fails_authentication
fails try_to_connect 1 --dhchap-secret="$own" --dhchap-ctrl-secret="$other"
fails try_to_connect 2 --dhchap-secret="$plain" --dhchap-ctrl-secret="$targets"
no_kernel_warnings .

check a_host_authenticates_on_every_queue
connect 1 --dhchap-secret="$own" --nr-io-queues=2
verified_io "$(disk_of $controller 1)"
disconnect $controller

check both_sides_authenticate
connect 1 --dhchap-secret="$own" --dhchap-ctrl-secret="$targets" --nr-io-queues=2
verified_io "$(disk_of $controller 1)"
disconnect $controller

check an_unhashed_secret_and_the_null_group_are_accepted
connect 2 --dhchap-secret="$plain" --nr-io-queues=1
verified_io "$(disk_of $controller 1)"
disconnect $controller
host stop target

check every_hash_and_several_groups_work_with_the_kernel
for terms in 'sha384 ffdhe2048' 'sha512 ffdhe3072' 'sha256 ffdhe4096'; do
  serve_guarded $terms
  connect 1 --dhchap-secret="$own" --dhchap-ctrl-secret="$targets" --nr-io-queues=1
  dd if=/dev/zero of="$(disk_of $controller 1)" bs=4k count=1 oflag=direct
  disconnect $controller
  host stop target
done

# After blktests nvme/045. Linux authenticates every queue again when a secret is written, and logs it for the first.
check a_connected_host_authenticates_again_with_secrets_that_were_replaced
serve_guarded sha256 ffdhe2048
connect 1 --dhchap-secret="$own" --dhchap-ctrl-secret="$targets" --nr-io-queues=2
keys=/sys/class/nvme/$controller
within 60 authenticated 1 sha256 ffdhe2048
echo "$own" >"$keys/dhchap_secret"
within 60 authenticated 2 sha256 ffdhe2048
host run "echo '$other' >own; blockmux ctl control read-keys $NQN"
echo "$other" >"$keys/dhchap_secret"
within 60 authenticated 3 sha256 ffdhe2048
renewed=$(nvme gen-dhchap-key --hmac=1 --nqn=$NQN)
host run "echo '$renewed' >targets; blockmux ctl control read-keys $NQN"
echo "$renewed" >"$keys/dhchap_ctrl_secret"
within 60 authenticated 4 sha256 ffdhe2048
host run "sed -i 's/sha256/sha512/; s/ffdhe2048/ffdhe3072/' blockmux.toml; blockmux ctl control reload"
echo "$other" >"$keys/dhchap_secret"
within 60 authenticated 1 sha512 ffdhe3072
verified_io "$(disk_of $controller 1)"
disconnect $controller
host stop target
no_kernel_warnings

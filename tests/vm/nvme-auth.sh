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

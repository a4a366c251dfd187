# TLS between the kernel's NVMe/TCP host and `blockmux serve --nvme-tcp`, and between our initiator and the kernel's target.
. /lib.sh
. /nvme.inc
. /tlshd.inc

host run "umask 77
  echo '$KEY' >key"
serve_disk "
  hosts = ['$(name_of 3)']
  [[nvme_subsystem.host]]
  hostnqn = '$(name_of 1)'
  tls_key_file = 'key'"

check linux_connects_with_tls
connect_with_tls 1
test -n "$(cat /sys/class/nvme/$controller/tls_key)"
verified_io "$(disk_of $controller 1)"
disconnect $controller
no_kernel_warnings .

check only_hosts_without_a_key_connect_without_tls
fails try_to_connect 1
connect 3 --nr-io-queues=1
disconnect $controller
no_kernel_warnings .

check data_written_over_tls_is_read_back_over_tls
connect_with_tls 1
file_system ext4 "$(disk_of $controller 1)"
disconnect $controller
host stop target

secured=yes
. /nvmet.inc
host run 'head -c 8M /dev/urandom >source.img
  truncate -s 32M source.img'

check we_connect_to_linux_with_tls
url="nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&tls_key_file=key&tls_identity=0"
host run "blockmux copy --overwrite --verify file:source.img '$url'"
host run "blockmux copy --overwrite '$url' file:back.img && cmp source.img back.img"
host run "blockmux bench '$url' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runs 1 --no_ceiling"
# The kernel logs the end of each connection.
no_kernel_warnings 'TLS Alert desc 0'
grep 'TLS Alert desc 0' kernel.all

check linux_refuses_our_initiator_without_a_key
fails host run "blockmux info 'nvme+tcp://$GUEST/$NQN/1?hostnqn=$(name_of 1)&ctrl_loss_tmo=0'"
no_kernel_warnings .

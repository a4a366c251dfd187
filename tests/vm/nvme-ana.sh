# The kernel's NVMe/TCP host with two listeners of `blockmux serve` in different ANA states, which `blockmux ctl` changes.
. /lib.sh
. /nvme.inc
modprobe nvme-core multipath=Y
modprobe nvme-tcp

host run "cat >blockmux.toml <<END
  [[volume]]
  name = 'one'
  spec = 'mem:128m'
  uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'
  shared = true
  [[volume]]
  name = 'two'
  spec = 'file:two.img?size=64m'
  [[nvme_subsystem]]
  nqn = '$NQN'
  namespaces = { 1 = 'one', 2 = 'two' }
  [[nvme_subsystem.ana_group]]
  ANAGRPID = 1
  namespaces = [1]
  states = { '$HOST:4421' = 'non-optimized' }
  [[nvme_subsystem.ana_group]]
  ANAGRPID = 2
  namespaces = [2]
  states = { '$HOST:4421' = 'inaccessible' }
END"
serve_both() { serve "--config blockmux.toml --control unix:control --nvme-tcp $HOST:4420 --nvme-tcp $HOST:4421"; }
serve_both
# ana_state PORT NSID: prints the ANA state in the kernel.
ana_state() {
  for path in /sys/class/nvme/nvme*/nvme*c*n*; do
    if grep -q "trsvcid=$1" "${path%/*}/address" && [ "$(cat "$path/nsid")" = "$2" ]; then
      cat "$path/ana_state"
    fi
  done
}
is_reached() { [ "$(ana_state "$1" "$2")" = "$3" ]; }
controller_at() { grep -l "trsvcid=$1" /sys/class/nvme/nvme*/address | cut -d / -f 5; }

check each_listener_reports_its_ana_states
try_to_connect 1 --nr-io-queues=1
nvme connect -t tcp -a "$HOST" -s 4421 -n $NQN --hostnqn="$(name_of 1)" --hostid="$(uuid_of 1)" --nr-io-queues=1
within 30 is_reached 4420 1 optimized
within 30 is_reached 4421 1 non-optimized
within 30 is_reached 4420 2 optimized
within 30 is_reached 4421 2 inaccessible
nvme ana-log "/dev/$(controller_at 4421)"

# head_of NSID: prints the multipath disk of the namespace; its paths have no disks.
head_of() {
  for block in /sys/block/nvme*n*; do
    if [ -b "/dev/${block##*/}" ] && [ "$(cat "$block/nsid")" = "$1" ]; then echo "/dev/${block##*/}"; fi
  done
}
has_head() { test -b "$(head_of "$1")"; }
ctl() { host run "blockmux ctl unix:control $*"; }

check io_moves_to_the_optimized_listener_when_states_change
within 30 has_head 1
disk=$(head_of 1)
begin_io "$disk"
sees_writes "$disk"
ctl ana $NQN 1 inaccessible --at "$HOST:4420"
within 30 is_reached 4420 1 inaccessible
sees_writes "$disk"
ctl ana $NQN 1 optimized --at "$HOST:4420"
ctl ana $NQN 1 inaccessible --at "$HOST:4421"
within 30 is_reached 4421 1 inaccessible
within 30 is_reached 4420 1 optimized
sees_writes "$disk"
ctl ana $NQN 1 non-optimized --at "$HOST:4421"
within 30 is_reached 4421 1 non-optimized
end_io

check an_attached_namespace_is_visible_and_usable
ctl add three=mem:64m
ctl attach three $NQN 3
within 30 has_head 3
within 30 is_reached 4420 3 optimized
verified_io "$(head_of 3)"
nvme list-ns "/dev/$(controller_at 4420)" | grep ':0x3$'

check a_detached_namespace_disappears_and_the_others_stay
ctl detach --force $NQN 3
has_no_head() { fails has_head "$1"; }
within 30 has_no_head 3
ctl remove three
verified_io "$disk"

check io_continues_on_the_other_listener_when_the_best_one_is_lost
begin_io "$disk"
sees_writes "$disk"
disconnect "$(controller_at 4420)"
sees_writes "$disk"
end_io
no_kernel_warnings .

check the_best_listener_is_used_again_when_it_is_back
try_to_connect 1 --nr-io-queues=1
within 30 is_reached 4420 1 optimized
verified_io "$disk"

check io_continues_after_the_target_is_killed_and_restarted
disk=$(head_of 2)
begin_io "$disk"
sees_writes "$disk"
host kill target
serve_both
within 60 is_reached 4420 2 optimized
sees_writes "$disk"
end_io
no_kernel_warnings .
nvme disconnect -n $NQN
host stop target
# A Keep Alive in flight has failed.
no_kernel_warnings 'keepalive RTT|nvme_keep_alive_end_io'

check io_continues_after_the_target_is_stopped_and_restarted
# Commands in flight take a while to end; the kernel submits more meanwhile.
host run "sed -i 's/mem:128m/delay:20ms:file:one.img?size=128m/' blockmux.toml"
again="--config blockmux.toml --nvme-tcp $HOST:4420 --nvme-tcp $HOST:4421"
serve "$again"
try_to_connect 1 --nr-io-queues=1 --reconnect-delay=2
within 30 has_head 1
disk=$(head_of 1)
begin_io "$disk"
sees_writes "$disk"
host stop target
serve "$again"
sees_writes "$disk"
end_io
no_kernel_warnings .
nvme disconnect -n $NQN
host stop target

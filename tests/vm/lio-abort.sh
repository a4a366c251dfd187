# Our iSCSI initiator against LIO when its disk hangs: LIO is asked to abort pending commands, and the connection stays.
. /lib.sh
modprobe nbd
# nbd-client writes its PID file there.
mkdir -p /var/run

# A disk that can be made to hang: the host can stop (SIGSTOP) its NBD server.
host start disk "sh -c 'echo \$\$ >pid; exec blockmux serve disk=mem:32m --nbd $HOST:10809'"
host until disk ready
nbd-client "$HOST" /dev/nbd0 -N disk
backing=/dev/nbd0
. /lio.inc
target open 0
logins="$lio/iscsi/$prefix:open/fabric_statistics/iscsi_login_stats/accepts"
commands="$lio/core/fileio_0/disk/statistics/scsi_lu/num_cmds"
has_many_commands() { [ "$(cat "$commands")" -gt 100 ]; }

check lio_is_asked_to_abort_pending_commands_and_its_connection_stays
host start bench "blockmux --verbose bench 'iscsi://$GUEST/$prefix:open/0?connections=1&timeout=24s' --rw randwrite \
  --bs 16k --iodepth 4 --verify crc32c --runtime 60 --runs 1 --no_ceiling"
within 60 has_many_commands
before=$(cat "$logins")
host run 'kill -STOP $(cat pid)'
host until bench 'the target is asked to abort pending commands'
host run 'kill -CONT $(cat pid)'
host wait bench
test "$(cat "$logins")" = "$before"
no_kernel_warnings 'Possible stuck request|ABORT_TASK'

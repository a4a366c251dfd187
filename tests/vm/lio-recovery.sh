# Our iSCSI initiator against LIO when its connection is cut with commands in flight, at error recovery levels 0 and 1.
. /lib.sh
. /lio.inc
target open 0
open="iscsi://$GUEST/$prefix:open/0?connections=1"
commands="$lio/core/fileio_0/disk/statistics/scsi_lu/num_cmds"

# cut: waits until further commands have completed, then resets the connection.
cut() {
  before=$(cat "$commands")
  within 60 has_more_commands
  ss -K "sport = :3260"
}
has_more_commands() { [ "$(cat "$commands")" -gt $((before + 50)) ]; }

# goes_on_after_cuts OPTIONS: runs a verifying bench with 16 writes in flight and cuts its connection twice.
goes_on_after_cuts() {
  host start bench "blockmux --verbose bench '$open$1' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runtime 20 \
    --runs 1 --no_ceiling 2>said"
  cut
  cut
  host wait bench
  host run 'cat said'
  no_kernel_warnings .     # LIO logs lost connections
}

check at_level_0_another_session_completes_the_requests_in_flight
goes_on_after_cuts ''

check at_level_1_another_session_completes_the_requests_in_flight
goes_on_after_cuts '&error_recovery_level=1&data_digest=on'

# Level 2 is not tested: when a connection with responses in flight is replaced, LIO of Linux 6.12 crashes by a null
# pointer (iscsit_discard_cr_cmds_by_expstatsn releases a command for which no thread waits).

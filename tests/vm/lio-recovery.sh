# Our iSCSI initiator against LIO when its connection is cut with commands in flight, at error recovery levels 0 and 1.
. /lib.sh
. /lio.inc
target open 0
open="iscsi://$GUEST/$prefix:open/0?connections=1"
commands="$lio/core/fileio_0/disk/statistics/scsi_lu/num_cmds"

# cut: as soon as some more commands have been done, the guest ends the connection, with a reset.
cut() {
  before=$(cat "$commands")
  within 60 has_more_commands
  ss -K "sport = :3260"
}
has_more_commands() { [ "$(cat "$commands")" -gt $((before + 50)) ]; }

# goes_on_after_cuts OPTIONS: a bench that has 16 writes in flight finds what it wrote, although it is cut off twice.
goes_on_after_cuts() {
  host start bench "blockmux --verbose bench '$open$1' --rw randwrite --bs 16k --iodepth 16 --verify crc32c --runtime 20 \
    --runs 1 --no_ceiling 2>said"
  cut
  cut
  host wait bench
  host run 'cat said'
  kernel_is_content .     # a target that is cut off has much to say
}

check at_level_0_what_was_in_flight_is_done_by_another_session
goes_on_after_cuts ''

check at_level_1_what_was_in_flight_is_done_by_another_session
goes_on_after_cuts '&error_recovery_level=1&data_digest=on'

# Not at level 2: when a connection is replaced whose answers were under way, LIO of Linux 6.12 dies of a null pointer
# (iscsit_discard_cr_cmds_by_expstatsn has a command released that nobody waits for).

# Functions for all scripts. Scripts run in the guest with `sh -ex`: a failed command ends the script, and all are logged.

# check SENTENCE: begins a test, which consists of the commands up to the next check.
check() {
  no_kernel_warnings
  echo "@check $1"
}

# host COMMAND: controls the host; xtask/src/vm/host.rs lists the commands. Returns the exit status.
host() {
  { set +x; } 2>/dev/null
  echo "@host $(printf %s "$*" | base64 -w 0)"
  read -r status
  set -x
  return "$status"
}

# serve ARGUMENTS: starts Blockmux on the host; `host stop target` or `host kill target` ends it.
serve() {
  host start target "blockmux serve $*"
  host until target ready
}

# fails COMMAND: succeeds if COMMAND fails. With set -e, `!` would accept both results.
fails() {
  if "$@"; then
    echo "succeeded but should fail: $*"
    return 1
  fi
}

# within SECONDS COMMAND: repeats COMMAND until it succeeds; fails after SECONDS.
within() {
  { set +x; } 2>/dev/null
  tenths=$(($1 * 10))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $tenths -gt 0 ] || { echo "timed out: $*"; return 1; }
    tenths=$((tenths - 1))
    sleep 0.1
  done
  set -x
}

# Harmless warnings: the emulated machine is slow, and a session's first command gets a unit attention. On a slow machine iscsid
# may send the next login request before the kernel has freed the task of the last one; it then logs in again.
slow='hrtimer: interrupt took|clocksource: |hogged CPU|Login/Text in progress. Cannot start new task'
unimportant='Power-on or device reset occurred'
# Pattern of warnings with a trace that are known faults of a kernel, and harm no test.
known_traces='^$'

# no_kernel_warnings [PATTERN]: fails if the kernel has logged a warning or an error since the last call, except lines that
# match PATTERN and harmless ones.
no_kernel_warnings() {
  { set +x; } 2>/dev/null
  dmesg -r -c >kernel
  cat kernel >>kernel.all
  if without_known_traces kernel | grep -E '^<[0-4]>' | grep -vE "$slow|$unimportant|${1:-^$}"; then
    echo "the kernel has logged a warning or an error"
    return 1
  fi
  set -x
}

# without_known_traces FILE: the kernel's messages in FILE without the traces that match $known_traces.
without_known_traces() {
  awk -v known="$known_traces" '
    /\[ cut here \]/ { trace = ""; is_trace = 1 }
    !is_trace { print; next }
    { trace = trace $0 "\n" }
    /\[ end trace / { if (trace !~ known) printf "%s", trace; is_trace = 0 }
    END { if (is_trace) printf "%s", trace }' "$1"
}

# file_system TYPE DEVICE: creates a file system, fills and checks it, and compares its files after dropping caches.
file_system() {
  case $1 in
    ext4) mkfs.ext4 -q -F "$2" ;;
    xfs) mkfs.xfs -q -f "$2" ;;
  esac
  mount -t "$1" "$2" /mnt
  cp -r /usr/lib/modules /mnt/
  umount /mnt
  case $1 in
    ext4) e2fsck -f -n "$2" ;;
    xfs) xfs_repair -n "$2" ;;
  esac
  mount -t "$1" "$2" /mnt
  diff -r /usr/lib/modules /mnt/modules
  umount /mnt
}

# verified_io DEVICE [OPTIONS]: fio writes random blocks and verifies them, bypassing the page cache.
verified_io() {
  device=$1
  shift
  said=$(mktemp)
  fio --name=io --filename="$device" --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bsrange=4k-64k \
    --size=24m --clocksource=clock_gettime --verify=crc32c --verify_fatal=1 --output="$said" --eta=never "$@" || {
    cat "$said"
    return 1
  }
}

# begin_io DEVICE [OPTIONS]: repeats verified_io in the background until `end_io`, which fails if a run has failed. Linux's NVMe/TCP
# host sends SIGPIPE to the process in whose name it uses a broken connection.
begin_io() {
  : >io_goes_on
  (
    trap '' PIPE
    while [ -e io_goes_on ]; do verified_io "$@" --rate=,4m; done
  ) &
  io=$!
}
end_io() {
  rm io_goes_on
  wait $io
}

# is_zero FILE MIB: succeeds if the first MIB of FILE are zeroes.
is_zero() {
  [ "$(dd if="$1" bs=1M count="$2" 2>/dev/null | tr -d '\0' | wc -c)" = 0 ]
}

# sees_writes DEVICE: waits until further writes have completed, which shows that I/O is in progress.
sees_writes() {
  before=$(writes "$1")
  within 60 has_more_writes "$1" || {
    cat "/sys/block/${1#/dev/}/inflight"    # log whether I/O is in flight
    return 1
  }
}
has_more_writes() { [ "$(writes "$1")" -gt $((before + 20)) ]; }
writes() { awk '{ print $5 }' "/sys/block/${1#/dev/}/stat"; }

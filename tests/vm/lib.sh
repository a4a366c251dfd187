# What the scripts share. They run in the guest by `sh -ex`: a command that fails ends the script, and each is in the log.

# check SENTENCE: what follows, up to the next check, shows that this is so.
check() {
  kernel_is_content
  echo "@check $1"
}

# host COMMAND: has the other side do something; xtask/src/vm/host.rs lists the commands. Its status is ours.
host() {
  { set +x; } 2>/dev/null
  echo "@host $(printf %s "$*" | base64 -w 0)"
  read -r status
  set -x
  return "$status"
}

# serve ARGUMENTS: Blockmux, until `host stop target` or `host kill target`.
serve() {
  host start target "blockmux serve $*"
  host until target ready
}

# fails COMMAND: succeeds if it does not; with set -e, `!` would let both pass.
fails() {
  if "$@"; then
    echo "this was to fail: $*"
    return 1
  fi
}

# within SECONDS COMMAND: until it succeeds.
within() {
  { set +x; } 2>/dev/null
  tenths=$(($1 * 10))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $tenths -gt 0 ] || { echo "not within time: $*"; return 1; }
    tenths=$((tenths - 1))
    sleep 0.1
  done
  set -x
}

# Warnings that say nothing of a peer: that the emulated machine is slow, and that a session's first command met it as one.
slow='hrtimer: interrupt took|clocksource: |hogged CPU'
unimportant='Power-on or device reset occurred'

# kernel_is_content [PATTERN]: of what the kernel has said since it was asked last, nothing is a warning or worse, but
# lines that match or are unimportant.
kernel_is_content() {
  { set +x; } 2>/dev/null
  dmesg -r -c >kernel
  cat kernel >>kernel.all
  if grep -E '^<[0-4]>' kernel | grep -vE "$slow|$unimportant|${1:-^$}"; then
    echo "the kernel has complained"
    return 1
  fi
  set -x
}

# file_system TYPE DEVICE: makes one, fills it, checks it, and finds everything again that does not come from memory.
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

# verified_io DEVICE [OPTIONS]: fio writes at random, and reads what it wrote, around the page cache.
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

# begin_io DEVICE [OPTIONS]: verified_io again and again, beside what follows, until `end_io`, which fails if one did.
begin_io() {
  : >io_goes_on
  while [ -e io_goes_on ]; do verified_io "$@" --rate=,4m; done &
  io=$!
}
end_io() {
  rm io_goes_on
  wait $io
}

# is_zero FILE MIB: the beginning of it.
is_zero() {
  [ "$(dd if="$1" bs=1M count="$2" 2>/dev/null | tr -d '\0' | wc -c)" = 0 ]
}

# sees_writes DEVICE: once some more have been done. It is how to know that I/O is under way.
sees_writes() {
  before=$(writes "$1")
  within 60 has_more_writes "$1" || {
    cat "/sys/block/${1#/dev/}/inflight"    # none: nobody asks for any
    return 1
  }
}
has_more_writes() { [ "$(writes "$1")" -gt $((before + 20)) ]; }
writes() { awk '{ print $5 }' "/sys/block/${1#/dev/}/stat"; }

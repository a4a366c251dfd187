#!/bin/sh
# Checks that this machine can build and run Blockmux, before a build of minutes begins: a C compiler, io_uring, a Rust
# toolchain that is new enough, memory and disk space. As root on Debian or Ubuntu it installs a missing compiler or toolchain
# from their packages; elsewhere it prints the command that does. `make` runs it.
#
#   contrib/toolchain.sh MEMORY_MIB DISK_MIB      # what the build needs
set -eu

memory_needed=$1 disk_needed=$2
cd "$(dirname "$0")/.."
minimum=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
rustup="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

has() { command -v "$1" >/dev/null; }

# is_at_least VERSION MINIMUM
is_at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

has_apt() { [ -f /etc/debian_version ] && has apt-get; }

may_install() { has_apt && [ "$(id -u)" = 0 ]; }

update() {
  apt-get update -qq >/dev/null 2>&1 || fail "'apt-get update' fails: see what it says"
  update() { :; }
}

# install PACKAGE...
install() {
  echo "installing $*"
  said=$(DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" 2>&1) ||
    fail "'apt-get install $*' fails: $(printf '%s\n' "$said" | grep '^E: ' | head -n 1)"
}

# Prints the package of the distribution that has a new enough cargo, if one has. Debian keeps `cargo-web` current, for browsers.
cargo_package() {
  for package in cargo cargo-web; do
    candidate=$(apt-cache policy "$package" | sed -n 's/^  Candidate: \([0-9.]*\).*/\1/p')
    if [ "$candidate" ] && is_at_least "$candidate" "$minimum"; then
      echo "$package"
      break
    fi
  done
}

# Compiles and runs a program that asks for an io_uring. Prints "ok" or the kernel's reason, or nothing without a compiler.
try_io_uring() {
  has cc || return 0
  directory=$(mktemp -d)
  cat >"$directory/try.c" <<'END'
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
  char parameters[120] = {0};
  puts(syscall(425 /* io_uring_setup */, 1, parameters) >= 0 ? "ok" : strerror(errno));
}
END
  if cc -o "$directory/try" "$directory/try.c" 2>/dev/null; then "$directory/try"; fi
  rm -r "$directory"
}

io_uring=$(try_io_uring)
if [ -z "$io_uring" ] && may_install; then
  update
  install gcc libc6-dev
  io_uring=$(try_io_uring)
fi
case $io_uring in
  ok) ;;
  '')
    missing="no C compiler" packages="gcc libc6-dev"
    if ! has cargo && has_apt && package=$(cargo_package) && [ "$package" ]; then
      missing="$missing and no cargo" packages="$packages $package ca-certificates"
    fi
    fail "there is $missing; on Debian or Ubuntu type: sudo apt-get install $packages"
    ;;
  *) fail "the kernel refuses io_uring ($io_uring): allow it by 'sysctl kernel.io_uring_disabled=0', or in the container's seccomp profile" ;;
esac

if ! has cargo; then
  package=
  if may_install; then update; fi
  if has_apt; then package=$(cargo_package); fi
  if [ -z "$package" ]; then
    fail "there is no cargo; type: $rustup"
  elif ! may_install; then
    fail "there is no cargo; type: sudo apt-get install $package ca-certificates"
  fi
  install "$package" ca-certificates
fi
# A program of rustup may have no toolchain.
version=$(cargo --version 2>/dev/null | sed 's/^cargo \([0-9.]*\).*/\1/')
if [ -z "$version" ]; then
  fail "'cargo --version' fails; type: rustup default stable"
elif ! is_at_least "$version" "$minimum"; then
  if has rustup; then
    newer="rustup update stable"
  elif has_apt && package=$(cargo_package) && [ "$package" ]; then
    newer="sudo apt-get install $package, which replaces it"
  else
    newer=$rustup
  fi
  fail "cargo $version is too old: Blockmux needs $minimum; type: $newer"
fi

# A build for which these are too small ends without a word about the reason. What is built already takes no more.
memory=$(awk '/^(MemAvailable|SwapFree):/ { sum += $2 } END { print int(sum / 1024) }' /proc/meminfo)
if [ "$memory" -lt "$memory_needed" ]; then
  fail "$memory MiB of memory are free, and the build needs $memory_needed"
fi
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
disk=$(df -Pm "$target" | awk 'END { print $4 }')
built=$(du -sm "$target" | cut -f 1)
if [ "$((disk + built))" -lt "$disk_needed" ]; then
  fail "$disk MiB are free in $(realpath "$target"), and the build needs $disk_needed; CARGO_TARGET_DIR=PATH builds elsewhere"
fi

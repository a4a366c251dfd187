#!/bin/sh
# Installs, starts, upgrades, removes and purges the Debian package in a Debian of its own, which systemd has booted in
# namespaces. `cargo xtask package --test` runs it, as root.
#
#   [SUITE=trixie] tests/package.sh PACKAGE NEWER DIRECTORY
#
# NEWER is the package with a higher version. DIRECTORY keeps the Debian for the next run, and the log. The Debian is bookworm
# (12) without SUITE; a later one has a later systemd.
set -eu

package=$(realpath "$1") newer=$(realpath "$2") directory=$(realpath --canonicalize-missing "$3")
suite=${SUITE-bookworm}
base=$directory/$suite root=$directory/root log=$directory/log

if [ "${4-}" != within ]; then
  mkdir -p "$directory"
  if [ ! -d "$base" ]; then
    rm -rf "$base.new"
    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,man-db,bash-completion,curl,openssl "$suite" "$base.new" \
      >"$directory/debootstrap.log"
    mv "$base.new" "$base"
  fi
  group=$(findmnt --noheadings --first-only --output TARGET --types cgroup2)/blockmux-package.$$
  mkdir "$group"
  # Its processes have ended with their namespace.
  trap 'find "$group" -depth -type d -exec rmdir {} \;' EXIT
  unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc \
    sh -c 'echo 0 >"$1/cgroup.procs"; shift; exec unshare --cgroup sh "$@"' - "$group" "$0" "$package" "$newer" "$directory" within
  exit
fi

mkdir -p "$root"
mount -t tmpfs tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/debian"
mount -t overlay -o "lowerdir=$base,upperdir=$root/upper,workdir=$root/work" overlay "$root/debian"
cd "$root/debian"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for device in null zero full random urandom tty; do cp -a "/dev/$device" dev; done
cp "$package" srv/old.deb
cp "$newer" srv/new.deb
ip link set lo up
hostname storage

unshare --mount --pid --fork --kill-child sh -c '
  mkdir -p .outer
  mount -t proc proc proc
  pivot_root . .outer
  umount -l .outer
  mount --make-rshared /    # as systemd leaves it where it mounts it itself; credentials need it
  exec env -i container=namespaces PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init' >"$log" 2>&1 &
unshared=$!
init=
until [ "$init" ]; do init=$(pgrep --parent "$unshared" || true); done

# within COMMAND...: runs a command in that Debian.
within() {
  nsenter --target "$init" --mount --pid --root --wd env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@" >>"$log" 2>&1
}
# said COMMAND...: prints what a command in that Debian prints.
said() {
  nsenter --target "$init" --mount --pid --root --wd env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@" \
    2>>"$log"
}
check() {
  test=$1
  echo "== $test" >>"$log"
}
ok() { echo "ok  $test"; }
fails() { if "$@"; then return 1; fi; }
ctl() { said blockmux ctl unix:/run/blockmux/control "$@"; }
failed() {
  echo "FAILED  ${test-boot}; the end of $log and of the journal:"
  tail -n 40 "$log"
  said journalctl --no-pager --lines 20 --unit blockmux || true
}
trap '[ $? = 0 ] || failed' EXIT

check systemd_boots
tries=0
until said systemctl is-system-running | grep -qE 'running|degraded'; do
  tries=$((tries + 1))
  test $tries -lt 600
  sleep 0.1
done
ok

check the_package_installs_and_starts_nothing
within dpkg --install /srv/old.deb
within getent passwd blockmux
fails within systemctl is-active blockmux
fails within systemctl is-enabled blockmux
test -z "$(said systemd-analyze verify blockmux.service 2>&1)"
ok

check man_pages_and_completions_are_found
within man --where blockmux blockmux-serve blockmux-ctl blockmux-ctl-resize
within bash -c '. /usr/share/bash-completion/bash_completion; _completion_loader blockmux; complete -p blockmux'
within test -s /usr/share/zsh/vendor-completions/_blockmux -a -s /usr/share/fish/vendor_completions.d/blockmux.fish
ok

check the_service_starts_as_its_user_without_capabilities
within blockmux check /etc/blockmux/blockmux.toml
within systemctl enable --now blockmux
within systemctl is-active blockmux
pid=$(said systemctl show --property MainPID --value blockmux)
test "$(said stat --format %U "/proc/$pid")" = blockmux
test "$(said cat "/proc/$pid/status" | grep -cE '^Cap(Prm|Eff|Bnd|Amb):.0*$')" = 4
ctl status | grep -q '^example '
ok

check a_changed_config_is_reloaded
said sh -c 'cat >>/etc/blockmux/blockmux.toml' <<END

[[volume]]
name = "data"
spec = "file:/var/lib/blockmux/data.img?size=16m"
END
within blockmux check --user blockmux /etc/blockmux/blockmux.toml
ctl diff | grep -q data
within systemctl reload blockmux
ctl status | grep -q '^data '
test "$(ctl diff)" = 'no changes'
said blockmux info nbd://127.0.0.1/data | grep -q 16777216
ok

check an_upgrade_restarts_the_service_and_keeps_config_and_volumes
before=$pid
within sh -c 'head -c 16M /dev/urandom >/srv/image'
within blockmux copy --overwrite file:/srv/image nbd://127.0.0.1/data
within dpkg --install /srv/new.deb
within systemctl is-active blockmux
pid=$(said systemctl show --property MainPID --value blockmux)
test "$pid" != "$before"
within systemctl is-enabled blockmux
within blockmux copy --overwrite nbd://127.0.0.1/data file:/srv/back
within cmp /srv/image /srv/back
ok

check a_removal_stops_the_service_and_keeps_config_user_and_volumes
within dpkg --remove blockmux
fails within systemctl is-active blockmux
fails within test -e /usr/bin/blockmux
within test -s /etc/blockmux/blockmux.toml -a -s /var/lib/blockmux/data.img
within getent passwd blockmux
ok

check a_purge_leaves_only_the_images_of_volumes_and_their_owner
within dpkg --install /srv/new.deb
said touch /var/lib/blockmux/volume-e98655a6-2085-8b16-8ad8-e657b39dcf5a.reservations
within dpkg --purge blockmux
fails within test -e /etc/blockmux
within test -s /var/lib/blockmux/data.img
fails within test -e /var/lib/blockmux/volume-e98655a6-2085-8b16-8ad8-e657b39dcf5a.reservations
within getent passwd blockmux
ok

check a_purge_without_images_leaves_nothing
within dpkg --install /srv/new.deb
said rm /var/lib/blockmux/data.img
within dpkg --purge blockmux
fails within test -e /var/lib/blockmux
fails within getent passwd blockmux
test -z "$(said find / -xdev -path /proc -prune -o -path /var/cache/man -prune -o -name '*blockmux*' -print)"
ok

# dynamic: whether the service runs as a user of DynamicUser=, and the daemon answers.
dynamic() {
  within systemctl is-active blockmux
  pid=$(said systemctl show --property MainPID --value blockmux)
  uid=$(said stat --format %u "/proc/$pid")
  # systemd.exec(5) reserves these UIDs for DynamicUser=.
  test "$uid" -ge 61184 -a "$uid" -le 65519
  test "$(said stat --format %u /var/lib/private/blockmux/)" = "$uid"
  test "$(said readlink /var/lib/blockmux)" = private/blockmux
  ctl status | grep -q "$1"
}
# remains: prints the files of the package outside of the administrator's drop-ins.
remains() {
  said find / -xdev -path /proc -prune -o -path /var/cache/man -prune -o -path /etc/systemd/system/blockmux.service.d -prune \
    -o -name '*blockmux*' -print
  said find /run -name '*blockmux*'
}
drop_in=/etc/systemd/system/blockmux.service.d/dynamic-user.conf

check a_drop_in_moves_the_service_and_its_volumes_to_a_dynamic_user
within dpkg --install /srv/old.deb
said sh -c 'cat >>/etc/blockmux/blockmux.toml' <<END

[[volume]]
name = "data"
spec = "file:/var/lib/blockmux/data.img?size=16m"
END
within systemctl enable --now blockmux
within blockmux copy --overwrite file:/srv/image nbd://127.0.0.1/data
within install -D -m 644 /usr/share/doc/blockmux/examples/dynamic-user.conf.example $drop_in
test -z "$(said systemd-analyze verify blockmux.service 2>&1)"
within systemctl daemon-reload
within systemctl restart blockmux
dynamic '^data '
within blockmux copy --overwrite nbd://127.0.0.1/data file:/srv/back
within cmp /srv/image /srv/back
ok

check state_of_a_dynamic_user_survives_a_restart_and_an_upgrade
within sh -c 'head -c 16M /dev/urandom >/srv/image'
within blockmux copy --overwrite file:/srv/image nbd://127.0.0.1/data
within systemctl restart blockmux
dynamic '^data '
within blockmux copy --overwrite nbd://127.0.0.1/data file:/srv/back
within cmp /srv/image /srv/back
within dpkg --install /srv/new.deb
dynamic '^data '
within blockmux copy --overwrite nbd://127.0.0.1/data file:/srv/back
within cmp /srv/image /srv/back
ok

check a_dynamic_user_reads_secrets_that_systemd_passes
said sh -c 'umask 077; openssl rand -hex 32 >/etc/blockmux/api.token'
within sed -i 's,^# \(api.*=\),\1,; s,/etc/blockmux/api.token,/run/credentials/blockmux.service/api.token,' \
  /etc/blockmux/blockmux.toml
within sed -i 's/^# LoadCredential/LoadCredential/' $drop_in
within systemctl daemon-reload
within systemctl restart blockmux
dynamic '^data '
within blockmux ctl http://127.0.0.1:9810 --token-file /etc/blockmux/api.token status
within sed -i 's/^LoadCredential/# LoadCredential/' $drop_in
within rm /etc/blockmux/api.token
within systemctl daemon-reload
ok

check a_purge_keeps_the_images_of_a_dynamic_user
said touch /var/lib/blockmux/volume-e98655a6-2085-8b16-8ad8-e657b39dcf5a.reservations
within dpkg --purge blockmux
within test -s /var/lib/blockmux/data.img
fails within test -e /var/lib/blockmux/volume-e98655a6-2085-8b16-8ad8-e657b39dcf5a.reservations
fails within test -e /run/blockmux -o -e /run/private/blockmux
ok

check a_purge_of_a_service_with_a_dynamic_user_leaves_nothing
within dpkg --install /srv/new.deb
within systemctl enable --now blockmux
dynamic '^example '
said rm /var/lib/blockmux/data.img
within dpkg --purge blockmux
fails within getent passwd blockmux
test -z "$(remains)"
ok

check a_service_with_a_dynamic_user_is_reinstalled
within dpkg --install /srv/new.deb
within systemctl enable --now blockmux
dynamic '^example '
within systemctl stop blockmux
within systemctl clean --what=state blockmux
within dpkg --purge blockmux
test -z "$(remains)"
ok

check without_the_drop_in_the_service_has_its_own_user_and_its_volumes_again
within dpkg --install /srv/new.deb
within systemctl enable --now blockmux
dynamic '^example '
said sh -c 'cat /srv/image >/var/lib/blockmux/data.img; chown --reference /var/lib/blockmux/ /var/lib/blockmux/data.img'
said rm -r ${drop_in%/*}
within systemctl daemon-reload
within systemctl restart blockmux
test "$(said stat --format '%U %F' /var/lib/blockmux)" = 'blockmux directory'
test "$(said stat --format %U /var/lib/blockmux/data.img)" = blockmux
said rm /var/lib/blockmux/data.img
within dpkg --purge blockmux
test -z "$(remains)"
ok

# The namespace ends with this process.

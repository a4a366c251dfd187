# The study of file systems over storage protocols, by attached disks and by the kernel's own initiators. Blockmux and bonnie++
# run in the guest.
. /lib.sh
unimportant='Power-on or device reset occurred'
mkdir -p /var/run /run/netns
modprobe -a ublk_drv veth sch_tbf xfs
rm -f /usr/bin/losetup     # so that a disk by FUSE would not do

# study TEXT...: measures the configurations with these texts; prints the report of bonnie++.
study() {
  rm -rf study.html
  blockmux bench --suite aatrokoski-2007 --file-system --size 16m --report study.html "$@" >said 2>&1 || {
    cat said
    return 1
  }
  cat said
}

check the_study_runs_on_ublk_disks_and_on_those_of_the_kernels_initiators
modprobe -a nbd aoe
study --only 'nbd, 4-way stripe, 1 Gbit/s, MTU 1500' --only 'nbd (kernel), 4-way stripe, 1 Gbit/s, MTU 1500' \
  --only 'aoe, 4-way stripe, no limit, MTU 9000' --only 'aoe (kernel), 4-way stripe, no limit, MTU 9000'
grep 'attached by ublk' said
fails grep failed said
test -s study.html

# The conformance suite of volumes through disks of the guest by ublk.
. /lib.sh
modprobe ublk_drv

# conforms_attached VOLUME: runs the suite on the volume's disk. It overwrites the volume.
conforms_attached() {
  blockmux attach "$1" --run 'conforms $device'
}

check the_suite_passes_with_blocks_of_4096_bytes
conforms_attached 'mem:64m?block_size=4096'

check the_suite_passes_on_a_file_with_blocks_of_512_bytes
truncate -s 64M disk.img
conforms_attached file:disk.img

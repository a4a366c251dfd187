# RDMA devices: `blockmux rdma` in the guest, with rxe, the kernel's software RoCEv2, over the guest's second interface.
. /lib.sh

# said TEXT...: succeeds if `blockmux rdma --json` has each text.
said() {
  blockmux rdma --json >found
  for text in "$@"; do
    grep -qF -- "$text" found || { echo "not found: $text"; cat found; return 1; }
  done
}
no_obstacles='"obstacles":[]'

check without_a_device_the_kernels_software_device_is_named
said '"rdma_core":true' '"devices":[]' '`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev IFACE`'
blockmux rdma | tee text
grep -q '^  none$' text

check a_device_is_listed_with_its_ports_and_what_is_missing
modprobe rdma_rxe
rdma link add rxe0 type rxe netdev eth1
said '"name":"rxe0","kind":"RoCE"' '/dev/infiniband/rdma_cm does not exist; load it with `modprobe rdma_ucm`'
modprobe rdma_ucm
within 20 said 'rxe0 has no active port'
ip link set eth1 up
ip addr add 10.88.0.15/24 dev eth1
within 20 said '"state":"ACTIVE"' '"address":"10.88.0.15","interface":"eth1"'
fails grep rdma_ucm found
fails grep 'active port' found

if [ -e /etc/libibverbs.d/rxe.driver ]; then
  check a_device_that_rdma_core_knows_says_what_it_can_do
  within 20 said '"ready":true' '"memory_windows":"2B"' '"mtu":1024' "$no_obstacles"
  grep -E '"queue_pairs":[1-9][0-9]*,"queue_depth":[1-9]' found
  blockmux rdma | tee text
  grep -E '^    memory   [0-9]+ registrations, opened to peers by windows of type 2B$' text
  mv /etc/libibverbs.d/rxe.driver rxe.driver
fi

check a_device_without_a_provider_is_an_obstacle
said '"ready":false' 'rdma-core has no provider for rxe0; install ibverbs-providers'

check without_rdma_core_its_packages_are_named
library=$(find /usr/lib -name 'librdmacm.so.1')
mv "$library" away
said '"rdma_core":false' '"name":"rxe0"' \
  'cannot load librdmacm.so.1: cannot open shared object file: No such file or directory; install rdma-core (Debian: libibverbs1,'
mv away "$library"

check a_removed_device_is_no_longer_listed
rdma link delete rxe0
said '"devices":[]'

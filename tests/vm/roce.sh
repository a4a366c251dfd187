# Software RoCEv2 against rxe, that of the Linux kernel: rping and perftest, with the kernel's queue pairs, on one side; ours in
# an ordinary UDP socket, with an example of crates/engine, on the other. Each side is at one end of a pair of interfaces.
. /lib.sh
. /rxe.inc

# serve_ours ADDRESS [MTU [RECEIVES]]: starts our side; stop_ours [PATTERN] waits until it says that all connections have ended,
# ends it, and fails if a connection has failed, unless the reason matches PATTERN.
serve_ours() {
  ip netns exec ours roce_peer serve "$1" --mtu "${2:-1024}" ${3:+--receives "$3"} >served 2>&1 &
  ours=$! connections=0
  within 20 bound
}
bound() { in_ours ss -Hlun 'sport = :4791' | grep -q .; }
have_ended() { [ "$(wc -l <served)" -ge $connections ]; }
stop_ours() {
  within 60 have_ended
  kill "$ours"
  wait "$ours" || true
  cat served
  grep failed served | fails grep -v "${1:-^$}"
}

# ping_ours ADDRESS SIZE COUNT: the kernel's side has data read and written back, and compares it.
ping_ours() {
  timeout 100 rping -c -v -V -a "$1" -S "$2" -C "$3" >said 2>&1 || { cut -c -200 said; return 1; }
  test "$(grep -c '^ping data: rdma-ping-' said)" = "$3"
  connections=$((connections + 1))
}

# ping_theirs ADDRESS OUR_ADDRESS SIZE COUNT [MTU]: our side has data read and written back, and compares it.
ping_theirs() {
  rping -s -v -a "$1" -S "$3" >served 2>&1 &
  theirs=$!
  within 20 listens
  in_ours timeout 100 roce_peer ping "$2" "$1" --size "$3" --count "$4" --mtu "${5:-1024}" || { cut -c -200 served; return 1; }
  wait $theirs || true
  test "$(grep -c '^server ping data: ' served)" = "$4"
}
listens() { rdma resource show cm_id | grep LISTEN; }

# perftest TEST PORT OPTIONS...: a bandwidth test of the kernel's side, against ours; prints its result.
perftest() {
  test=$1
  shift
  timeout 100 "$test" -R -F -p "$@" $our_ipv4 >said 2>&1 || { cat said; return 1; }
  connections=$((connections + 2))     # one for the test, and one to prepare it
  grep -A 1 '#bytes' said
}

check rping_has_its_data_read_and_written_back
serve_ours $our_ipv4
for size in 23 1024 1025 4096 65535; do ping_ours $our_ipv4 $size 10; done
stop_ours

check rping_reads_our_data_and_writes_it_back
for size in 23 1024 1025 4096 60000; do ping_theirs $rxe_ipv4 $our_ipv4 $size 10; done

check rping_works_over_ipv6
serve_ours $our_ipv6
for size in 23 65535; do ping_ours $our_ipv6 $size 10; done
stop_ours
for size in 23 60000; do ping_theirs $rxe_ipv6 $our_ipv6 $size 10; done

check perftest_sends_reads_and_writes
serve_ours $our_ipv4
perftest ib_send_bw 18515 -s 65536 -n 100
perftest ib_read_bw 18516 -s 65536 -n 100
perftest ib_write_bw 18517 -s 65536 -n 100
stop_ours
grep '100 messages with 6553600 bytes' served

check a_sender_waits_for_receive_buffers
serve_ours $our_ipv4 1024 1
perftest ib_send_bw 18515 -s 4096 -n 50
stop_ours
grep '50 messages with 204800 bytes' served

# Each direction loses, damages, doubles and reorders packets.
check a_bad_network_costs_time_and_no_data
# The peer compares what it reads. When it ends, it requests the disconnection once, which may be lost.
left='no longer acknowledges packets'
tc qdisc add dev rxe root netem delay 1ms reorder 95% loss 1% duplicate 1% corrupt 1%
in_ours tc qdisc add dev ours root netem delay 1ms reorder 95% loss 1% duplicate 1% corrupt 1%
serve_ours $our_ipv4
for size in 23 4096 65535; do ping_ours $our_ipv4 $size 20; done
perftest ib_send_bw 18515 -s 16384 -n 20
perftest ib_write_bw 18517 -s 16384 -n 20
stop_ours "$left"
for size in 23 4096 60000; do ping_theirs $rxe_ipv4 $our_ipv4 $size 10; done
serve_ours $our_ipv6
ping_ours $our_ipv6 65535 10
stop_ours "$left"
ping_theirs $rxe_ipv6 $our_ipv6 60000 10
tc qdisc del dev rxe root
in_ours tc qdisc del dev ours root

check packets_have_4096_bytes_on_a_path_that_allows_it
ip link set rxe mtu 4500
in_ours ip link set ours mtu 4500
serve_ours $our_ipv4 4096
for size in 4096 4097 65535; do ping_ours $our_ipv4 $size 10; done
perftest ib_send_bw 18515 -s 65536 -n 100
perftest ib_read_bw 18516 -s 65536 -n 100
before=$(cat /sys/class/net/rxe/statistics/tx_packets)
perftest ib_write_bw 18517 -s 65536 -n 100
after=$(cat /sys/class/net/rxe/statistics/tx_packets)
test $((after - before)) -lt 3200     # shorter packets would be 6400 or more
stop_ours
ping_theirs $rxe_ipv4 $our_ipv4 60000 10 4096

check a_port_without_a_server_refuses
serve_ours $our_ipv4
fails rping -c -a $our_ipv4 -p 7175 -C 1
stop_ours
fails in_ours timeout 20 roce_peer ping $our_ipv4 $rxe_ipv4 2>said
grep 'INVALID_SERVICE_ID' said || { cat said; exit 1; }

//! Packet sockets with their rings and filters, between the two ends of a virtual cable in a
//! private network.

mod own_network;

use blockmux_engine::net::frames::{FramePort, PacketPort, Share, Side};
use blockmux_proto::driver::frames::{FrameOutbox, Mac, OutFrame, PortId, Station};
use blockmux_volume::{Chunk, Memory, Seg, SgList};
use own_network::is_in_own_network;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::process::Command;
use std::time::{Duration, Instant};

/// Interfaces that are connected to each other.
const CABLE: &str = "ip link add cable type veth peer name far && ip link set cable up && ip link set far up";
/// An interface on top of one of them.
const MACVLAN: &str = "ip link add link cable name upper type macvlan mode bridge && ip link set upper up";

fn target(interface: &str) -> PacketPort {
    PacketPort::open(interface, Side::Target(Share::ALL)).unwrap()
}

fn mac(port: &mut PacketPort) -> Mac {
    FramePort::query_info(port).unwrap().mac
}

/// Sends frames with these AoE headers, followed by `payload`.
fn send(from: &mut PacketPort, frames: &[(Mac, [u8; 10])], payload: &[u8]) {
    let mut outbox = FrameOutbox::default();
    for (mac, header) in frames {
        let payload = if payload.is_empty() { SgList::default() } else { Seg::from_slice(payload).into() };
        outbox.push_back(OutFrame::new(Station { port: PortId(0), mac: *mac }, header, payload));
    }
    while !outbox.is_empty() {
        FramePort::send(from, PortId(0), &mut outbox).unwrap();
    }
}

/// Receives until the frame in which byte 9 is `last` has arrived.
fn receive(port: &mut PacketPort, last: u8) -> Vec<Vec<u8>> {
    let (mut frames, until) = (Vec::new(), Instant::now() + Duration::from_secs(10));
    while frames.last().is_none_or(|frame: &Vec<u8>| frame[9] != last) {
        assert!(Instant::now() < until, "frame {last} does not arrive; {} have", frames.len());
        let stride = FramePort::stride(port);
        let mut chunk = Chunk::new(Memory::from_heap(64 * stride));
        let mut arrivals = Vec::new();
        if FramePort::receive(port, &mut chunk, &mut arrivals).is_err() {
            let second = Timespec { tv_sec: 1, tv_nsec: 0 };
            poll(&mut [PollFd::new(port, PollFlags::IN)], Some(&second)).unwrap();
        }
        for arrival in arrivals {
            // Dropped frames have no bytes.
            frames.extend((arrival.len > 0).then(|| chunk.unread()[..arrival.len].to_vec()));
            chunk.take(stride);
        }
    }
    frames
}

const REQUEST: u8 = 0x10;
const RESPONSE: u8 = 0x18;
const ATA: u8 = 0;
const QUERY: u8 = 1;

/// A header with this slot of the disk, command, upper byte of the tag, and number.
fn header(flags: u8, slot: u8, command: u8, id: u8, number: u8) -> [u8; 10] {
    [flags, 0, 0, 1, slot, command, id, 0, 0, number]
}

#[test]
fn frames_for_a_stacked_interface_are_not_received() {
    if !is_in_own_network("frames_for_a_stacked_interface_are_not_received", &format!("{CABLE} && {MACVLAN}"))
    {
        return;
    }
    let [mut cable, mut upper, mut far] = ["cable", "upper", "far"].map(target);
    let macs = [mac(&mut cable), mac(&mut upper)];
    let to = (1..).zip([macs[0], macs[1], Mac::BROADCAST, Mac([2; 6]), macs[0]]);
    let frames: Vec<_> = to.map(|(number, mac)| (mac, header(REQUEST, 1, ATA, 0, number))).collect();
    send(&mut far, &frames, &[]);
    for (port, expected) in [(&mut cable, vec![1, 3, 5]), (&mut upper, vec![2, 3])] {
        let received = receive(port, expected[expected.len() - 1]);
        assert_eq!(received.iter().map(|frame| frame[9]).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn the_kernel_passes_each_frame_to_the_socket_that_it_is_for() {
    if !is_in_own_network("the_kernel_passes_each_frame_to_the_socket_that_it_is_for", CABLE) {
        return;
    }
    let mut far = target("far");
    let shares = [0, 1, 2].map(|nth| Side::Target(Share { nth, of: 3 }));
    let mut ports = shares.map(|side| PacketPort::open("cable", side).unwrap());
    let mut initiator = PacketPort::open("cable", Side::Initiator { id: 7 }).unwrap();
    let to = mac(&mut initiator);
    let requests = (0..60).map(|slot| (to, header(REQUEST, slot, ATA, 7, slot)));
    let responses = [(ATA, 7), (ATA, 8), (QUERY, 0)];
    let responses =
        (60..).zip(responses).map(|(number, (command, id))| (to, header(RESPONSE, 1, command, id, number)));
    send(&mut far, &requests.chain(responses).collect::<Vec<_>>(), &[]);
    let received = receive(&mut initiator, 62);
    assert_eq!(received.iter().map(|frame| frame[9]).collect::<Vec<_>>(), [60, 62]);
    let sender = mac(&mut far).0[5];
    let mut slots = Vec::new();
    for (nth, port) in (0..).zip(&mut ports) {
        let own: Vec<u8> = (0..60).filter(|slot| (sender ^ slot) % 3 == nth).collect();
        let received = receive(port, own[own.len() - 1]);
        assert_eq!(received.iter().map(|frame| frame[9]).collect::<Vec<_>>(), own, "core {nth}");
        slots.extend(own);
    }
    slots.sort_unstable();
    assert!(slots.into_iter().eq(0..60));
}

#[test]
fn a_ring_is_used_again_and_again_and_replaced_when_the_mtu_changes() {
    if !is_in_own_network("a_ring_is_used_again_and_again_and_replaced_when_the_mtu_changes", CABLE) {
        return;
    }
    let [mut cable, mut far] = ["cable", "far"].map(target);
    let to = mac(&mut cable);
    let buffers = FramePort::query_info(&mut cable).unwrap().buffers;
    for (mtu, len) in [(1500, 1400), (9000, 8900), (1500, 1400)] {
        for end in ["cable", "far"] {
            let set = Command::new("ip").args(["link", "set", end, "mtu", &mtu.to_string()]).status();
            assert!(set.unwrap().success());
        }
        for port in [&mut cable, &mut far] {
            assert_eq!(FramePort::query_info(port).unwrap().mtu, mtu);
        }
        // More rounds than the ring has slots for.
        for round in 0..3 * buffers / 50 {
            let frames = (0..50).map(|number| (to, header(REQUEST, 1, ATA, 0, number))).collect::<Vec<_>>();
            let payload = vec![round as u8; len];
            send(&mut far, &frames, &payload);
            let received = receive(&mut cable, 49);
            assert_eq!(received.len(), 50, "round {round} with an MTU of {mtu}");
            for (number, frame) in (0..).zip(&received) {
                assert!(frame[9] == number && frame[10..] == payload, "frame {number} of round {round}");
            }
        }
    }
}

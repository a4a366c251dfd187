//! A port over a packet socket.

use super::FramePort;
use super::kernel::{self, Instruction, ReceivedFrame};
use super::ring::FrameRing;
use crate::net::host::SocketWatch;
use blockmux_proto::driver::frames::EtherType;
use blockmux_proto::driver::frames::{FrameOutbox, FramePortInfo, PortId};
use blockmux_volume::Chunk;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The AoE frames that a port receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Requests of this core's share.
    Target(Share),
    /// Replies to config queries, and to commands whose tags have this upper byte.
    Initiator {
        /// Upper byte of the tags.
        id: u8,
    },
}

/// The share of requests that one core serves. All requests of one initiator to one disk belong to
/// the same core, which therefore sees retransmits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index of the core.
    pub nth: u8,
    /// Number of cores, at least one.
    pub of: u8,
}

impl Share {
    /// The share of a single core.
    pub const ALL: Share = Share { nth: 0, of: 1 };
}

/// An interface with a packet socket for one side of AoE.
pub struct PacketPort {
    fd: OwnedFd,
    name: String,
    /// Index of the interface that the socket is bound to.
    index: i32,
    stride: usize,
    /// Receive ring; `None` if memory ran out when the MTU changed.
    ring: Option<FrameRing>,
    /// The task was parked, so that the wake-up may be for an error.
    was_parked: Cell<bool>,
}

impl PacketPort {
    /// Opens the interface of that name.
    ///
    /// # Errors
    /// As `packet(7)`: `PermissionDenied` without `CAP_NET_RAW`, `ENODEV` if there is no such
    /// interface.
    pub fn open(name: &str, side: Side) -> io::Result<PacketPort> {
        let fd = kernel::open()?;
        let interface = kernel::interface(&fd, name)?;
        kernel::set_send_buffer(&fd, BUFFER);
        kernel::filter(&fd, &program(side))?;
        let stride = stride_of(interface.mtu);
        let ring = Some(FrameRing::new(&fd, stride)?);
        kernel::bind(&fd, interface.index, EtherType::ETH_P_AOE)?;
        let (name, index, was_parked) = (name.to_owned(), interface.index, Cell::new(false));
        Ok(PacketPort { fd, name, index, stride, ring, was_parked })
    }

    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FramePort for PacketPort {
    type Watch = SocketWatch;

    // An interface that was removed and re-created under its name counts as the same.
    fn query_info(&mut self) -> io::Result<FramePortInfo> {
        let interface = kernel::interface(&self.fd, &self.name)?;
        if interface.index != self.index {
            kernel::bind(&self.fd, interface.index, EtherType::ETH_P_AOE)?;
            self.index = interface.index;
        }
        let stride = stride_of(interface.mtu);
        if stride != self.stride || self.ring.is_none() {
            self.stride = stride;
            self.ring = match self.ring.take() {
                Some(ring) => Some(ring.replace(&self.fd, stride)?),
                None => Some(FrameRing::new(&self.fd, stride)?),
            };
        }
        let buffers = self.ring.as_ref().map_or(0, |ring| ring.slots) as u32;
        Ok(FramePortInfo { mac: interface.mac, mtu: interface.mtu, buffers, is_up: interface.is_up })
    }

    #[inline]
    fn stride(&self) -> usize {
        self.stride
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, arrivals: &mut Vec<ReceivedFrame>) -> io::Result<()> {
        if let Some(ring) = &mut self.ring {
            ring.receive(chunk, (self.index, self.stride), kernel::BATCH, arrivals);
        }
        if !arrivals.is_empty() {
            self.was_parked.set(false);
            return Ok(());
        }
        if self.was_parked.take() {
            // Only this call reports the error, and until it is read, the socket stays readable.
            kernel::take_error(&self.fd)?;
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    #[inline]
    fn send(&mut self, id: PortId, outbox: &mut FrameOutbox) -> io::Result<usize> {
        kernel::send(self.fd.as_raw_fd(), self.index, EtherType::ETH_P_AOE, id, outbox)
    }

    fn wake_when_readable(&self, watch: &SocketWatch) {
        self.was_parked.set(true);
        watch.wake_when(self, libc::POLLIN);
    }

    fn wake_when_writable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLOUT);
    }
}

impl AsFd for PacketPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Bytes for one frame: whole cache lines, with room for VLAN tags that a driver has left in.
fn stride_of(mtu: u32) -> usize {
    (mtu as usize).clamp(MIN_MTU, MAX_MTU).next_multiple_of(64) + 64
}

/// The filter: drops frames for the other side, for another core, or for another queue.
fn program(side: Side) -> Vec<Instruction> {
    const ACCEPT: Instruction = (RETURN, 0, 0, u32::MAX);
    const DROP: Instruction = (RETURN, 0, 0, 0);
    let response = u32::from(blockmux_proto::aoe::AOE_FLAG_RESPONSE);
    match side {
        Side::Target(Share { of: 0 | 1, .. }) => {
            vec![(LOAD_BYTE, 0, 0, 0), (JUMP_IF_SET, 0, 1, response), DROP, ACCEPT]
        }
        Side::Target(Share { nth, of }) => vec![
            (LOAD_BYTE, 0, 0, 0),
            (JUMP_IF_SET, 6, 0, response),
            (LOAD_BYTE, 0, 0, SENDER_LAST),
            (KEEP, 0, 0, 0),
            (LOAD_BYTE, 0, 0, SLOT),
            (XOR_KEPT, 0, 0, 0),
            (MODULO, 0, 0, of.into()),
            (JUMP_IF_EQUAL, 1, 0, nth.into()),
            DROP,
            ACCEPT,
        ],
        Side::Initiator { id } => vec![
            (LOAD_BYTE, 0, 0, 0),
            (JUMP_IF_SET, 0, 5, response),
            (LOAD_BYTE, 0, 0, 5),
            (JUMP_IF_EQUAL, 2, 0, u32::from(blockmux_proto::aoe::AoeCommand::QUERY_CONFIG_INFORMATION.0)),
            (LOAD_BYTE, 0, 0, 6),
            (JUMP_IF_EQUAL, 0, 1, u32::from(id)),
            ACCEPT,
            DROP,
        ],
    }
}

/// Last byte of the sender's address; the Ethernet header begins at `SKF_LL_OFF`.
const SENDER_LAST: u32 = (libc::SKF_LL_OFF + 11) as u32;
/// Offset of AoE's minor address.
const SLOT: u32 = 4;
/// `BPF_LD | BPF_B | BPF_ABS`.
const LOAD_BYTE: u16 = 0x30;
/// `BPF_JMP | BPF_JSET | BPF_K`.
const JUMP_IF_SET: u16 = 0x45;
/// `BPF_JMP | BPF_JEQ | BPF_K`.
const JUMP_IF_EQUAL: u16 = 0x15;
/// `BPF_MISC | BPF_TAX`.
const KEEP: u16 = 0x07;
/// `BPF_ALU | BPF_XOR | BPF_X`.
const XOR_KEPT: u16 = 0xac;
/// `BPF_ALU | BPF_MOD | BPF_K`.
const MODULO: u16 = 0x94;
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 0x06;

/// Size of the send buffer, in bytes: more than 64 jumbo frames.
const BUFFER: usize = 4 << 20;
const MIN_MTU: usize = 1500;
/// Upper bound; Ethernet's own limit is far lower.
const MAX_MTU: usize = 65_535;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the kernel would deliver a frame whose sender's address ends with `sender`.
    fn delivers_from(program: &[Instruction], sender: u8, frame: &[u8]) -> bool {
        let (mut at, mut loaded, mut kept) = (0, 0, 0);
        loop {
            let (code, jt, jf, k) = program[at];
            at += 1;
            match code {
                LOAD_BYTE if k == SENDER_LAST => loaded = sender.into(),
                LOAD_BYTE => loaded = u32::from(frame[k as usize]),
                KEEP => kept = loaded,
                XOR_KEPT => loaded ^= kept,
                MODULO => loaded %= k,
                JUMP_IF_SET => at += usize::from(if loaded & k != 0 { jt } else { jf }),
                JUMP_IF_EQUAL => at += usize::from(if loaded == k { jt } else { jf }),
                _ => return k != 0,
            }
        }
    }

    fn delivers(program: &[Instruction], frame: &[u8]) -> bool {
        delivers_from(program, 0, frame)
    }

    #[test]
    fn requests_of_one_initiator_to_one_disk_reach_only_one_core() {
        let programs: Vec<_> = (0..3).map(|nth| program(Side::Target(Share { nth, of: 3 }))).collect();
        let mut counts = [0; 3];
        for (sender, slot) in (0..16).flat_map(|sender| (0..8).map(move |slot| (sender, slot))) {
            let core = |tag: u8, flags: u8| -> Vec<usize> {
                let frame = [flags, 0, 0, 1, slot, 0, tag, tag, 0, 0];
                (0..3).filter(|core| delivers_from(&programs[*core], sender, &frame)).collect()
            };
            let cores = core(1, 0x10);
            assert_eq!((cores.len(), &core(200, 0x10)), (1, &cores), "{sender} {slot}");
            assert!(core(1, 0x18).is_empty(), "a response");
            counts[cores[0]] += 1;
        }
        assert!(counts.iter().all(|count| *count > 30), "{counts:?}");
    }

    #[test]
    fn each_side_receives_only_frames_for_it() {
        let frame = |flags, command, id| [flags, 0, 0, 1, 1, command, id, 0, 0, 0];
        let (target, initiator) = (program(Side::Target(Share::ALL)), program(Side::Initiator { id: 7 }));
        let all = [
            (frame(0x10, 0, 7), true, false),
            (frame(0x10, 1, 7), true, false),
            (frame(0x18, 0, 7), false, true),
            (frame(0x18, 0, 8), false, false),
            (frame(0x18, 1, 0), false, true),
            (frame(0x1c, 0, 7), false, true),
        ];
        for (frame, to_target, to_initiator) in all {
            let got = (delivers(&target, &frame), delivers(&initiator, &frame));
            assert_eq!(got, (to_target, to_initiator), "{frame:x?}");
        }
    }

    #[test]
    fn a_missing_interface_is_an_error() {
        match PacketPort::open("no-such-iface", Side::Target(Share::ALL)) {
            Ok(_) => panic!("no such interface should exist"),
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)), "{error}")
            }
        }
    }
}

//! Frames that the kernel has laid into memory which it shares with us (`PACKET_RX_RING` of
//! `packet(7)`, `TPACKET_V2`).
//!
//! ```text
//!   block │ slot │ slot │ slot │ - │ block │ slot │ ...        slot:  status, lengths │ sender │ frame │ spare
//! ```
//! A slot belongs to the kernel or to us, as its status says; whose it is decides who may touch the
//! rest. Both go round in the same order. The kernel copies a frame in while it handles the
//! interrupt and frees its own memory on the processor that took it; we copy it on into a [`Chunk`]
//! and give the slot back at once, so that whatever is lent of a frame never keeps the kernel from
//! receiving. To look whether something has come costs no system call. The page 22 of
//! `docs/decisions` has what that was measured against.
#![expect(unsafe_code, reason = "memory that is shared with the kernel, and the calls that make it")]

use super::kernel::{self, ReceivedFrame, check};
use blockmux_proto::frames::Mac;
use blockmux_volume::Chunk;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// The slots of one socket.
pub(super) struct FrameRing {
    map: NonNull<u8>,
    /// In bytes.
    block: usize,
    /// In bytes.
    slot: usize,
    /// Slots of a block.
    per_block: usize,
    slots: usize,
    /// The slot that the next frame comes to.
    next: usize,
}

impl FrameRing {
    /// A ring on a socket that has none, for frames of at most `most` bytes behind the Ethernet
    /// header.
    ///
    /// # Errors
    /// If the kernel has no memory for it.
    pub(super) fn new(fd: &OwnedFd, most: usize) -> io::Result<FrameRing> {
        let slot = (FRAME_AT + most).next_multiple_of(libc::TPACKET_ALIGNMENT);
        let block = (slot * MIN_PER_BLOCK).next_multiple_of(PAGE);
        let per_block = block / slot;
        let blocks = (SLOTS / per_block).max(1);
        let slots = per_block * blocks;
        kernel::set_int(
            fd,
            libc::SOL_PACKET,
            libc::PACKET_VERSION,
            libc::tpacket_versions::TPACKET_V2 as i32,
        )?;
        request(fd, block, blocks, slot, slots)?;
        // SAFETY: a new mapping of a ring that is as long as that, which nothing else knows of.
        let map = unsafe {
            let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            libc::mmap(std::ptr::null_mut(), block * blocks, access, kind, fd.as_raw_fd(), 0)
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(FrameRing { map, block, slot, per_block, slots, next: 0 })
    }

    /// Another ring in its place. What has come meanwhile and was not received is lost.
    ///
    /// # Errors
    /// As for [`Ring::new`]; the socket has no ring then.
    pub(super) fn replace(self, fd: &OwnedFd, most: usize) -> io::Result<FrameRing> {
        drop(self);
        request(fd, 0, 0, 0, 0)?;
        FrameRing::new(fd, most)
    }

    /// Frames that can wait.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Moves frames of the interface `index` into the chunk's spare part, one every `stride` bytes,
    /// at most `most`, as many as there are and fit, and tells of each; the chunk is told of whole
    /// strides.
    #[inline]
    pub(super) fn receive(
        &mut self,
        chunk: &mut Chunk,
        (index, stride): (i32, usize),
        most: usize,
        arrivals: &mut Vec<ReceivedFrame>,
    ) {
        for _ in 0..most.min(chunk.room() / stride) {
            let header = self.at(self.next);
            // SAFETY: a slot begins with its status, which the kernel and we only use as an atomic
            // word.
            let status = unsafe { AtomicU32::from_ptr(&raw mut (*header).tp_status) };
            if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return;
            }
            // SAFETY: the slot is ours until its status is set, and within the mapping.
            arrivals.push(unsafe { self.take(header, chunk, (index, stride)) });
            status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = if self.next + 1 == self.slots { 0 } else { self.next + 1 };
        }
    }

    /// The header of a slot.
    #[inline]
    fn at(&self, nth: usize) -> *mut libc::tpacket2_hdr {
        let offset = nth / self.per_block * self.block + nth % self.per_block * self.slot;
        // SAFETY: within the mapping, for there are as many slots as blocks hold. Slots are aligned
        // as their headers are.
        unsafe { self.map.add(offset).cast().as_ptr() }
    }

    /// Copies a frame out of its slot.
    ///
    /// # Safety
    /// The slot has to be ours.
    #[inline]
    unsafe fn take(
        &self,
        header: *const libc::tpacket2_hdr,
        chunk: &mut Chunk,
        (index, stride): (i32, usize),
    ) -> ReceivedFrame {
        // SAFETY: the kernel has written both before it gave us the slot.
        let (head, sender) = unsafe { (&*header, &*header.byte_add(SENDER_AT).cast::<libc::sockaddr_ll>()) };
        let (offset, len) = (usize::from(head.tp_net), head.tp_snaplen as usize);
        // A socket at an interface is also given what comes by that for one stacked upon it: a
        // VLAN's, a macvlan's. Those are other networks, or other stations, and whoever answers
        // them answers here.
        let is_for_us = sender.sll_ifindex == index
            && matches!(
                sender.sll_pkttype,
                libc::PACKET_HOST | libc::PACKET_BROADCAST | libc::PACKET_MULTICAST
            );
        let is_whole = head.tp_len == head.tp_snaplen && offset + len <= self.slot && len <= stride;
        let len = if is_for_us && is_whole { len } else { 0 };
        // SAFETY: within the slot, as was just checked, and nobody else touches it.
        let frame = unsafe {
            std::slice::from_raw_parts(header.byte_add(if len > 0 { offset } else { 0 }).cast(), len)
        };
        chunk.spare()[..len].copy_from_slice(frame);
        chunk.fill(stride);
        let [a, b, c, d, e, f, ..] = sender.sll_addr;
        ReceivedFrame { mac: Mac([a, b, c, d, e, f]), len }
    }
}

impl Drop for FrameRing {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; no reference into it outlives a call.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.slots / self.per_block * self.block) };
    }
}

/// Asks for a ring, or with zeroes for none.
fn request(fd: &OwnedFd, block: usize, blocks: usize, slot: usize, slots: usize) -> io::Result<()> {
    let [tp_block_size, tp_block_nr, tp_frame_size, tp_frame_nr] =
        [block, blocks, slot, slots].map(|value| value as libc::c_uint);
    let request = libc::tpacket_req { tp_block_size, tp_block_nr, tp_frame_size, tp_frame_nr };
    // SAFETY: the request lives during the call and is as long as it says.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_RX_RING,
            (&raw const request).cast(),
            size_of::<libc::tpacket_req>() as libc::socklen_t,
        )
    };
    check(result as isize)?;
    Ok(())
}

/// Frames that can wait: two batches of several initiators. More would be memory that is cold each
/// time round.
const SLOTS: usize = 256;
/// So that little of a block is left over.
const MIN_PER_BLOCK: usize = 16;
const PAGE: usize = 4096;
/// Where a slot has the sender's address: behind its header, aligned.
const SENDER_AT: usize = size_of::<libc::tpacket2_hdr>().next_multiple_of(libc::TPACKET_ALIGNMENT);
/// Where it has the frame at most: the kernel aligns, and leaves room for a header that we do not
/// ask for.
const FRAME_AT: usize =
    (SENDER_AT + size_of::<libc::sockaddr_ll>()).next_multiple_of(libc::TPACKET_ALIGNMENT) + 16;

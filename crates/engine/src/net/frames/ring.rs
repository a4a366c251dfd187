//! A receive ring in memory shared with the kernel (`PACKET_RX_RING` of `packet(7)`, `TPACKET_V2`).
//!
//! ```text
//!   block │ slot │ slot │ slot │ - │ block │ slot │ ...        slot:  status, lengths │ sender │ frame │ spare
//! ```
//! A slot's status says whether the kernel or this program owns it; only the owner may access the
//! rest. Both use the slots in the same order. The kernel copies a frame into a slot in the
//! interrupt handler. [`FrameRing::receive`] copies it to a [`Chunk`] and returns the slot at once,
//! so that borrowed payload never keeps the kernel from receiving. Polling the status costs no
//! system call. Decision 22 compares this with alternatives.
#![expect(unsafe_code, reason = "memory that is shared with the kernel, and the calls that make it")]

use super::kernel::{self, ReceivedFrame, check};
use blockmux_proto::driver::frames::Mac;
use blockmux_volume::Chunk;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// The slots of one socket.
pub(super) struct FrameRing {
    map: NonNull<u8>,
    /// Size of a block, in bytes.
    block: usize,
    /// Size of a slot, in bytes.
    slot: usize,
    /// Slots in a block.
    per_block: usize,
    /// Number of frames that the ring can hold.
    pub(super) slots: usize,
    /// The slot of the next frame.
    next: usize,
}

impl FrameRing {
    /// Sets up the ring of a socket that has none, for frames of at most `most` bytes after the
    /// Ethernet header.
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
        // SAFETY: this creates a new mapping of the ring, which has that length; nothing else
        // refers to it.
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

    /// Replaces the ring. Frames that were not received yet are lost.
    ///
    /// # Errors
    /// As for [`FrameRing::new`]; the socket has no ring then.
    pub(super) fn replace(self, fd: &OwnedFd, most: usize) -> io::Result<FrameRing> {
        drop(self);
        request(fd, 0, 0, 0, 0)?;
        FrameRing::new(fd, most)
    }

    /// Copies up to `most` frames of the interface `index` into the chunk's spare part, one every
    /// `stride` bytes, as far as they have arrived and fit; adds an entry to `arrivals` for each,
    /// and advances the chunk by whole strides.
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
            // SAFETY: a slot begins with its status, which both the kernel and this program only
            // access as an atomic word.
            let status = unsafe { AtomicU32::from_ptr(&raw mut (*header).tp_status) };
            if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return;
            }
            // SAFETY: this program owns the slot until it sets the status, and the slot is within
            // the mapping.
            arrivals.push(unsafe { self.take(header, chunk, (index, stride)) });
            status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = if self.next + 1 == self.slots { 0 } else { self.next + 1 };
        }
    }

    /// The header of a slot.
    #[inline]
    fn at(&self, nth: usize) -> *mut libc::tpacket2_hdr {
        let offset = nth / self.per_block * self.block + nth % self.per_block * self.slot;
        // SAFETY: within the mapping, because `slots` is the number of slots in all blocks. Slots
        // are aligned for their headers.
        unsafe { self.map.add(offset).cast().as_ptr() }
    }

    /// Copies a frame out of its slot.
    ///
    /// # Safety
    /// This program must own the slot.
    #[inline]
    unsafe fn take(
        &self,
        header: *const libc::tpacket2_hdr,
        chunk: &mut Chunk,
        (index, stride): (i32, usize),
    ) -> ReceivedFrame {
        // SAFETY: the kernel wrote both before it passed the slot on.
        let (head, sender) = unsafe { (&*header, &*header.byte_add(SENDER_AT).cast::<libc::sockaddr_ll>()) };
        let (offset, len) = (usize::from(head.tp_net), head.tp_snaplen as usize);
        // The socket also receives frames for a VLAN or macvlan interface on top of this one. Those
        // belong to other networks or stations, which must not be answered from here.
        let is_for_us = sender.sll_ifindex == index
            && matches!(
                sender.sll_pkttype,
                libc::PACKET_HOST | libc::PACKET_BROADCAST | libc::PACKET_MULTICAST
            );
        let is_whole = head.tp_len == head.tp_snaplen && offset + len <= self.slot && len <= stride;
        let len = if is_for_us && is_whole { len } else { 0 };
        // SAFETY: within the slot, as was just checked, and nothing else accesses it.
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
        // SAFETY: unmaps the mapping that `new` made; no reference into it outlives a call.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.slots / self.per_block * self.block) };
    }
}

/// Requests a ring of the kernel, or removes it if all numbers are 0.
fn request(fd: &OwnedFd, block: usize, blocks: usize, slot: usize, slots: usize) -> io::Result<()> {
    let [tp_block_size, tp_block_nr, tp_frame_size, tp_frame_nr] =
        [block, blocks, slot, slots].map(|value| value as libc::c_uint);
    let request = libc::tpacket_req { tp_block_size, tp_block_nr, tp_frame_size, tp_frame_nr };
    // SAFETY: the request lives during the call, and its length is that of the structure.
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

/// Number of slots of the ring: enough for two batches of several initiators. More memory would not
/// stay in the CPU's cache.
const SLOTS: usize = 256;
/// Minimum number of slots in a block, so that little memory is wasted at its end.
const MIN_PER_BLOCK: usize = 16;
const PAGE: usize = 4096;
/// Offset of the sender's address in a slot: after the header, aligned.
const SENDER_AT: usize = size_of::<libc::tpacket2_hdr>().next_multiple_of(libc::TPACKET_ALIGNMENT);
/// Maximum offset of the frame in a slot: the kernel aligns it, and leaves room for a header that
/// is not used.
const FRAME_AT: usize =
    (SENDER_AT + size_of::<libc::sockaddr_ll>()).next_multiple_of(libc::TPACKET_ALIGNMENT) + 16;

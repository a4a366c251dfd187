//! A guest that breaks its virtqueue: records change its memory, and decide what the device does.
//!
//! | kind | bytes | effect |
//! |---|---|---|
//! | 0 | offset (2), the rest | the guest writes bytes at the offset |
//! | 1 | a descriptor (2) | the guest makes it available |
//! | 2 | - | the device takes requests |
//! | 3 | number (1) | an I/O completes, or fails |
//! | 4 | - | the device publishes answers |
//! | 5 | - | the device asks for notifications |
//! | 6 | offset (2), the rest | the front end writes bytes to the record of requests in flight |
//! | 7 | - | another process goes on |

use crate::records::Records;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::virtio::wire::Features;
use blockmux_proto::virtio::{BlkDevice, BlkQueue, GuestMemory, GuestRegion, InflightRecord, RingAreas};
use blockmux_volume::{Completion, Io, IoError, MemVolume, Memory, Output, Volume, VolumeInfo};
use blockmux_wire::virtio::vhost_user::inflight_region;
use std::sync::Arc;
use std::time::Instant;

/// A device and its guest.
struct Machine {
    exports: Exports,
    memory: Memory,
    record: Memory,
    queue: BlkQueue,
    begun: Vec<Io>,
}

/// Whatever the guest writes, the queue neither panics nor has more I/O in flight than descriptors.
pub(crate) fn virtio_queue(input: &[u8]) {
    let memory = Memory::from_heap(MEMORY);
    let record = Memory::from_heap(inflight_region::len(SIZE));
    let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
    let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let queue = queue(&exports, &memory, &record);
    let mut machine = Machine { exports, memory, record, queue, begun: Vec::new() };
    let mut records = Records(input);
    while let Some(kind) = records.kind() {
        let bytes = if matches!(kind % 8, 0 | 1 | 3 | 6) { records.bytes() } else { Vec::new() };
        machine.step(kind % 8, &bytes);
        assert!(machine.begun.len() <= usize::from(SIZE), "more I/O than descriptors");
    }
}

fn queue(exports: &Exports, memory: &Memory, record: &Memory) -> BlkQueue {
    let region = || GuestRegion { guest_addr: 0, user_addr: 0, memory: memory.clone() };
    let guest = GuestMemory::new(vec![region()]);
    let areas = RingAreas::of_user(&guest, SIZE, (0, AVAIL, USED)).expect("they are in the memory");
    let device = BlkDevice::new(&VolumeInfo::new(1 << 20), 1, "serial").state(Features::RING_EVENT_IDX);
    let record = InflightRecord::of_queue(&record.seg(0, record.len()), 0, SIZE, SIZE);
    let mut queue = BlkQueue::new((exports, VolumeId(0)), device, guest, (areas, SIZE, 0), record)
        .expect("the volume is there");
    queue.enable(true);
    queue
}

impl Machine {
    fn step(&mut self, kind: u8, bytes: &[u8]) {
        match kind {
            0 => write(&self.memory, bytes),
            1 => {
                let head = bytes.first_chunk().map_or(0, |head| u16::from_be_bytes(*head));
                let avail = self.memory.seg(AVAIL as usize, 64);
                let idx = avail.load_u16(2);
                avail.store_u16(4 + 2 * usize::from(idx % SIZE), head);
                avail.store_u16(2, idx.wrapping_add(1));
            }
            2 => {
                // An error stops the queue, and is returned once.
                let _ = self.queue.take_requests();
                while let Some((volume, io)) = self.queue.poll_io() {
                    if self.queue.begin(volume, &io, false).is_ok() {
                        self.begun.push(io);
                    }
                }
            }
            3 if !self.begun.is_empty() => {
                let nth = bytes.first().map_or(0, |nth| usize::from(*nth));
                let io = self.begun.swap_remove(nth % self.begun.len());
                let result = if nth < 200 { Ok(Output::Nothing) } else { Err(IoError::Medium) };
                self.queue.on_io(Completion { tag: io.tag, result }, Instant::now());
            }
            4 => drop(self.queue.publish()),
            5 => drop(self.queue.ask_for_kicks()),
            6 => write(&self.record, bytes),
            7 => {
                self.begun.clear();
                self.queue = queue(&self.exports, &self.memory, &self.record);
            }
            _ => {}
        }
    }
}

/// Writes bytes at the offset before them, as far as there is room.
fn write(memory: &Memory, bytes: &[u8]) {
    let Some((offset, bytes)) = bytes.split_first_chunk() else { return };
    let offset = usize::from(u16::from_be_bytes(*offset)) % memory.len();
    let len = bytes.len().min(memory.len() - offset);
    memory.seg(offset, len).copy_from(&bytes[..len]);
}

const SIZE: u16 = 8;
const AVAIL: u64 = 0x100;
const USED: u64 = 0x200;
const MEMORY: usize = 0x4000;

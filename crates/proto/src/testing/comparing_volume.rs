//! A RAM volume that compares and writes by itself, as images of Ceph do.

use blockmux_volume::{
    Channel, Completion, Core, Io, IoError, MemVolume, Op, Output, Tag, Volume, VolumeInfo, Waker,
};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct ComparingVolume {
    inner: MemVolume,
    unit: u32,
    /// Otherwise it answers that it cannot.
    is_able: bool,
    counts: Arc<[AtomicUsize; 2]>,
}

struct ComparingChannel {
    inner: Box<dyn Channel>,
    is_able: bool,
    counts: Arc<[AtomicUsize; 2]>,
    done: Vec<Completion>,
}

impl ComparingVolume {
    /// A volume of 8 MiB with units of this many bytes.
    pub(crate) fn new(unit: u32, is_able: bool) -> ComparingVolume {
        ComparingVolume { inner: MemVolume::new(8 << 20), unit, is_able, counts: Arc::default() }
    }

    /// How often it was asked to compare and write, and how often it has written.
    pub(crate) fn counts(&self) -> [usize; 2] {
        [0, 1].map(|nth: usize| self.counts.get(nth).map_or(0, |count| count.load(Ordering::Relaxed)))
    }
}

impl Volume for ComparingVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { compare_and_write_unit: self.unit, ..self.inner.info() }
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let inner = self.inner.open(core, depth, waker)?;
        let counts = self.counts.clone();
        Ok(Box::new(ComparingChannel { inner, is_able: self.is_able, counts, done: Vec::new() }))
    }
}

impl ComparingChannel {
    fn compare_and_write(&mut self, io: Io) -> Result<Output, IoError> {
        let [asked, written] = &*self.counts;
        asked.fetch_add(1, Ordering::Relaxed);
        if !self.is_able {
            return Ok(Output::NotCompared);
        }
        let data = io.data.unwrap_or_default().to_vec();
        let (expected, new) = data.split_at(io.len as usize);
        let mut call = |io: Io| {
            let mut done = Vec::new();
            self.inner.submit(io);
            self.inner.poll(&mut done);
            done.remove(0).result
        };
        let found = call(Io::new(Tag(0), Op::Read, io.offset, io.len))?.into_data().to_vec();
        if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
            return Ok(Output::Differs(at as u64));
        }
        written.fetch_add(1, Ordering::Relaxed);
        let data = Some(blockmux_volume::Seg::from_slice(new).into());
        call(Io { data, ..Io::new(Tag(0), Op::Write { fua: false }, io.offset, io.len) })
    }
}

impl Channel for ComparingChannel {
    fn submit(&mut self, io: Io) {
        if !matches!(io.op, Op::CompareAndWrite { .. }) {
            return self.inner.submit(io);
        }
        let tag = io.tag;
        let result = self.compare_and_write(io);
        self.done.push(Completion { tag, result });
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        self.inner.poll(done);
    }
}

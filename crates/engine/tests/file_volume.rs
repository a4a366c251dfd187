//! File and block-device volumes on a real reactor, with files in the temporary folder.

mod conforms;

use blockmux_engine::core::reactor::{PollPolicy, Reactor};
use blockmux_engine::volume::file::{BlockOptions, FileOptions, FileVolume, OpenError};
use blockmux_volume::{
    BlockSizes, Channel, Chunk, Completion, Core, Extent, Io, IoError, MAX_TRANSFER, Memory, Op, Output,
    ReadyList, Resize, Seg, SgList, Tag, Volume,
};
use conforms::conforms;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use tempfile::TempDir;

const READ: Op = Op::Read;
const WRITE: Op = Op::Write { fua: false };
const STABLE_WRITE: Op = Op::Write { fua: true };
const PUNCH: Op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
const ZERO: Op = Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false };
const STABLE_ZERO: Op = Op::WriteZeroes { fua: true, may_unmap: false, only_fast: false };
const DEPTH: u32 = 16;
const SIZE: u64 = 64 << 20;

/// A core, and one channel to a volume.
struct Bench {
    channel: Box<dyn Channel>,
    reactor: Reactor,
    ready: Rc<ReadyList>,
    next_tag: u64,
    /// Removed when the bench is dropped.
    folder: Option<TempDir>,
}

impl Bench {
    fn new(volume: &FileVolume) -> Bench {
        Bench::with_pool(volume, 256 << 20)
    }

    fn with_pool(volume: &FileVolume, pool_limit_bytes: usize) -> Bench {
        let (reactor, _inbox) = Reactor::new(PollPolicy::Never, pool_limit_bytes).unwrap();
        let core: Rc<dyn Core> = reactor.core().clone();
        let ready = ReadyList::new();
        let channel = volume.open(&core, DEPTH, ready.waker(0)).unwrap();
        Bench { channel, reactor, ready, next_tag: 0, folder: None }
    }

    /// A bench over a new file.
    fn on_new_file(direct: bool) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let volume = open(&folder.path().join("disk"), direct);
        Bench { folder: Some(folder), ..Bench::new(&volume) }
    }

    fn path(&self) -> PathBuf {
        self.folder.as_ref().unwrap().path().join("disk")
    }

    fn submit(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Tag {
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        self.channel.submit(Io { tag, op, offset, len, data });
        self.channel.kick();
        tag
    }

    /// Waits for at least one completion. It polls once, and then only when woken.
    fn wait(&mut self) -> Vec<Completion> {
        let mut done = Vec::new();
        self.channel.poll(&mut done);
        while done.is_empty() {
            let ready = &self.ready;
            self.reactor.run_until(|| ready.pop().is_some()).unwrap();
            self.channel.poll(&mut done);
        }
        done
    }

    fn run(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Result<Output, IoError> {
        let tag = self.submit(op, offset, len, data);
        let mut done = self.wait();
        assert_eq!((done.len(), done[0].tag), (1, tag));
        done.remove(0).result
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let data = SgList::one(Seg::from_slice(bytes));
        self.run(WRITE, offset, bytes.len() as u64, Some(data)).unwrap();
    }

    fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        self.run(READ, offset, len, None).unwrap().into_data().to_vec()
    }

    fn zero(&mut self, op: Op, offset: u64, len: u64) -> Result<Output, IoError> {
        self.run(op, offset, len, None)
    }

    fn extents(&mut self, offset: u64, len: u64) -> Vec<Extent> {
        match self.run(Op::BlockStatus, offset, len, None).unwrap() {
            Output::Extents(extents) => extents,
            other => panic!("block status returned {other:?}"),
        }
    }
}

fn open(path: &Path, direct: bool) -> FileVolume {
    let options =
        FileOptions { size: Some(SIZE), direct: Some(direct), create: true, ..FileOptions::default() };
    match FileVolume::open(path, options) {
        Err(OpenError::NoDirect(_)) => {
            skip("direct I/O", "the temporary folder's file system has none; buffered instead");
            open(path, false)
        }
        opened => opened.unwrap(),
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) + at / 509 + seed) as u8).collect()
}

fn all_are(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|&byte| byte == value)
}

#[expect(clippy::print_stderr, reason = "a test that is not run says so")]
fn skip(what: &str, why: &str) {
    eprintln!("skipped: {what}: {why}");
}

#[test]
fn written_data_is_read_back_buffered_and_direct() {
    for direct in [false, true] {
        let mut bench = Bench::on_new_file(direct);
        let bytes = pattern(1 << 20, 1);
        bench.write(4096, &bytes);
        assert!(bench.read(4096, 1 << 20) == bytes);
        let data = SgList::one(Memory::from_heap(8192).seg(0, 8192));
        let read = bench.run(READ, 8192, 8192, Some(data)).unwrap().into_data();
        assert_eq!(read.to_vec(), bytes[4096..12288]);
        bench.run(STABLE_WRITE, 0, 4096, Some(SgList::one(Seg::from_slice(&bytes[..4096])))).unwrap();
        bench.run(Op::Flush, 0, 0, None).unwrap();
        let mut found = vec![0; 4096];
        File::open(bench.path()).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, bytes[..4096]);
    }
}

#[test]
fn the_largest_transfer_and_lists_of_many_segments_complete() {
    for direct in [false, true] {
        let mut bench = Bench::on_new_file(direct);
        let bytes = pattern(MAX_TRANSFER as usize, 2);
        bench.write(0, &bytes);
        assert!(bench.read(0, MAX_TRANSFER.into()) == bytes);
        // More segments than one system call takes, in descending order of addresses.
        let (pieces, piece) = (3000, 512);
        let memory = Memory::from_heap(pieces * piece);
        let mut list = SgList::default();
        (0..pieces).rev().for_each(|nth| list.push(memory.seg(nth * piece, piece)));
        list.copy_from(&bytes[..pieces * piece]);
        let len = list.len() as u64;
        bench.run(WRITE, 1 << 20, len, Some(list.clone())).unwrap();
        list.fill_zero();
        let read = bench.run(READ, 1 << 20, len, Some(list)).unwrap().into_data();
        assert!(read.to_vec() == bytes[..pieces * piece]);
    }
}

#[test]
fn direct_io_bounces_borrowed_and_unaligned_memory() {
    let mut bench = Bench::on_new_file(true);
    let bytes = pattern(3 << 20, 3);
    let len = bytes.len() as u64;
    let mut chunk = Chunk::new(Memory::from_heap(bytes.len() + 28));
    chunk.extend(&[0; 28]);
    chunk.extend(&bytes);
    let lent = chunk.slice(28, bytes.len());
    bench.run(WRITE, 4096, len, Some(SgList::one(lent))).unwrap();
    assert!(bench.read(4096, len) == bytes);
    let memory = Memory::from_heap(bytes.len() + 4096);
    let mut uneven = SgList::one(memory.seg(3, 100_000));
    uneven.push(memory.seg(100_100, bytes.len() - 100_000));
    let read = bench.run(READ, 4096, len, Some(uneven)).unwrap().into_data();
    assert!(read.to_vec() == bytes);
}

#[test]
fn requests_wait_for_memory_of_the_pool_and_all_complete() {
    let folder = tempfile::tempdir().unwrap();
    let volume = open(&folder.path().join("disk"), true);
    // The pool has two buffers, and sixteen requests need one each.
    let mut bench = Bench::with_pool(&volume, 3 * 65536);
    let tags: Vec<Tag> =
        (0..DEPTH).map(|nth| bench.submit(READ, u64::from(nth) << 16, 65536, None)).collect();
    let mut found = Vec::new();
    while found.len() < tags.len() {
        let some = bench.wait();
        assert!(some.len() <= 2);
        // Dropping the data returns its memory to the pool.
        found.extend(some.into_iter().map(|completion| {
            completion.result.unwrap();
            completion.tag
        }));
    }
    found.sort();
    assert_eq!(found, tags);
    assert_eq!(bench.run(READ, 0, 1 << 20, None).unwrap_err(), IoError::NoMemory);
}

#[test]
fn a_request_that_waits_for_memory_starts_when_some_is_freed_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let volume = open(&folder.path().join("disk"), false);
    let mut bench = Bench::with_pool(&volume, 2 * 65536);
    let held = bench.reactor.core().pool().take(65536).unwrap();
    bench.submit(READ, 0, 65536, None);
    let mut done = Vec::new();
    bench.channel.poll(&mut done);
    assert!(done.is_empty());
    drop(held);
    bench.wait().remove(0).result.unwrap();
}

#[test]
fn a_request_that_waits_for_memory_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let volume = open(&folder.path().join("disk"), false);
    let mut bench = Bench::with_pool(&volume, 2 * 65536);
    let _taken = bench.reactor.core().pool().take_payload(65536).unwrap();
    let tag = bench.submit(READ, 0, 65536, None);
    bench.channel.cancel(tag);
    assert_eq!(bench.wait().remove(0).result.unwrap_err(), IoError::Aborted);
}

#[test]
fn cancelled_io_still_completes_once() {
    let mut bench = Bench::on_new_file(true);
    let mut tags: Vec<Tag> = (0..8).map(|nth| bench.submit(READ, nth << 20, 1 << 20, None)).collect();
    tags.push(bench.submit(STABLE_ZERO, 0, SIZE, None));
    tags.iter().for_each(|&tag| bench.channel.cancel(tag));
    let mut found: Vec<Tag> = Vec::new();
    while found.len() < tags.len() {
        for completion in bench.wait() {
            assert!(matches!(completion.result, Ok(_) | Err(IoError::Aborted)), "{completion:?}");
            found.push(completion.tag);
        }
    }
    found.sort();
    assert_eq!(found, tags);
    bench.read(0, 4096);
    bench.run(Op::Flush, 0, 0, None).unwrap();
}

#[test]
fn holes_are_reported_and_punching_frees_space() {
    let mut bench = Bench::on_new_file(true);
    bench.write(1 << 20, &pattern(1 << 20, 4));
    bench.run(Op::Flush, 0, 0, None).unwrap();
    let hole = |len| Extent { len, hole: true, zero: true };
    let data = |len| Extent { len, hole: false, zero: false };
    assert_eq!(bench.extents(0, SIZE), [hole(1 << 20), data(1 << 20), hole(SIZE - (2 << 20))]);
    assert_eq!(bench.extents(1 << 20, 4096), [data(4096)]);
    let path = bench.path();
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    assert!(before >= 2048);
    bench.zero(Op::Discard { fua: true }, 1 << 20, 1 << 19).unwrap();
    bench.zero(PUNCH, 3 << 19, 1 << 19).unwrap();
    assert!(blocks() <= before - 2048);
    assert!(all_are(&bench.read(1 << 20, 1 << 20), 0));
    assert_eq!(bench.extents(0, SIZE), [hole(SIZE)]);
}

#[test]
fn zeroing_without_unmapping_keeps_the_bytes_around_it_and_the_space() {
    for direct in [false, true] {
        let mut bench = Bench::on_new_file(direct);
        bench.write(0, &[7; 1 << 20]);
        bench.run(Op::Flush, 0, 0, None).unwrap();
        let path = bench.path();
        let blocks = || std::fs::metadata(&path).unwrap().blocks();
        let before = blocks();
        bench.zero(STABLE_ZERO, 4096, 299_008).unwrap();
        assert!(blocks() >= before);
        let bytes = bench.read(0, 1 << 20);
        assert!(all_are(&bytes[4096..303_104], 0));
        assert!(all_are(&bytes[..4096], 7) && all_are(&bytes[303_104..], 7));
    }
}

#[test]
fn one_request_zeroes_more_than_four_gigabytes() {
    let folder = tempfile::tempdir().unwrap();
    let size = 10 << 30;
    let options = FileOptions { size: Some(size), create: true, ..FileOptions::default() };
    let volume = FileVolume::open(folder.path().join("disk"), options).unwrap();
    let mut bench = Bench::new(&volume);
    for offset in [0, 5 << 30, size - 4096] {
        bench.write(offset, &[1; 4096]);
    }
    let only_fast = volume.info().fast_zeroes;
    let zero = Op::WriteZeroes { fua: false, may_unmap: true, only_fast };
    bench.zero(zero, 4096, size - 4096).unwrap();
    assert_eq!(bench.read(0, 4096), [1; 4096]);
    assert_eq!(bench.read(5 << 30, 4096), [0; 4096]);
    assert_eq!(bench.read(size - 4096, 4096), [0; 4096]);
}

#[test]
fn a_file_truncated_while_it_is_served_has_medium_errors() {
    for direct in [false, true] {
        let mut bench = Bench::on_new_file(direct);
        bench.write(0, &[1; 8192]);
        File::options().write(true).open(bench.path()).unwrap().set_len(4096).unwrap();
        assert_eq!(bench.run(READ, 0, 8192, None).unwrap_err(), IoError::Medium);
        assert_eq!(bench.run(READ, 1 << 20, 4096, None).unwrap_err(), IoError::Medium);
        assert_eq!(bench.read(0, 4096), [1; 4096]);
    }
}

#[test]
fn a_truncated_range_is_not_written_until_the_volume_is_resized() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let options = FileOptions { size: Some(1 << 20), create: true, ..FileOptions::default() };
    let volume = FileVolume::open(&path, options).unwrap();
    let mut bench = Bench::new(&volume);
    let page = |fill| Some(SgList::one(Seg::from_slice(&[fill; 4096])));
    bench.write(0, &[1; 8192]);
    // The write is the first request; nothing has read beyond the new end before it.
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    let write = Op::Write { fua: false };
    for op in [Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false }, Op::Discard { fua: false }]
    {
        assert_eq!(bench.run(op, 8192, 4096, None).unwrap_err(), IoError::Medium);
    }
    assert_eq!(bench.run(write, 512 << 10, 4096, page(2)).unwrap_err(), IoError::Medium);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    bench.write(4096, &[3; 4096]);
    // Extending the file by a hole does not restore the data.
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(bench.run(READ, 8192, 4096, None).unwrap_err(), IoError::Medium);
    volume.resize(Resize::grow(1 << 20)).unwrap();
    bench.write(512 << 10, &[2; 4096]);
    assert_eq!(bench.read(8192, 4096), [0; 4096]);
    assert_eq!(bench.read(4096, 4096), [3; 4096]);
}

#[test]
fn a_partial_last_block_is_padded_with_zeroes() {
    for (direct, aligned) in [(false, true), (true, true), (true, false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, pattern(10_000, 3)).unwrap();
        let options = FileOptions { direct: Some(direct), ..FileOptions::default() };
        let volume = match FileVolume::open(&path, options) {
            Err(OpenError::NoDirect(_)) => {
                return skip("direct I/O", "the temporary folder's file system has none");
            }
            opened => opened.unwrap(),
        };
        let size = volume.info().size;
        assert_eq!(size, 10_000_u64.next_multiple_of(volume.info().logical_block.into()));
        let mut bench = Bench::new(&volume);
        let whole = [pattern(10_000, 3), vec![0; size as usize - 10_000]].concat();
        let memory = Memory::from_heap(size as usize + 1);
        memory.seg(0, size as usize + 1).copy_from(&vec![0xee; size as usize + 1]);
        let data = SgList::one(memory.seg(usize::from(!aligned), size as usize));
        assert!(bench.run(READ, 0, size, Some(data)).unwrap().into_data().to_vec() == whole);
        assert_eq!(bench.extents(0, size).iter().map(|extent| extent.len).sum::<u64>(), size);
        assert_eq!(path.metadata().unwrap().len(), 10_000, "reading changes no file");
        let block = u64::from(volume.info().logical_block);
        bench.write(size - block, &vec![7; block as usize]);
        assert!(all_are(&bench.read(size - block, block), 7));
        assert_eq!(path.metadata().unwrap().len(), size);
    }
}

#[test]
fn a_registered_buffer_is_left_to_the_kernel_and_refused_where_this_process_needs_its_bytes() {
    let buffer = || SgList::one(Memory::registered(3, 4096).seg(0, 4096));
    let mut bench = Bench::on_new_file(false);
    // The ring has no such buffer, so the kernel fails the transfer, and nothing else happens.
    for op in [READ, WRITE] {
        assert_eq!(bench.run(op, 0, 4096, Some(buffer())).unwrap_err(), IoError::Medium);
    }
    assert!(all_are(&bench.read(0, 4096), 0));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, pattern(10_000, 1)).unwrap();
    let volume =
        FileVolume::open(&path, FileOptions { direct: Some(false), ..FileOptions::default() }).unwrap();
    let mut bench = Bench::new(&volume);
    let part = |len| SgList::one(Memory::registered(3, 4096).seg(0, len));
    // Its last block is partial: the rest of it reads as zeroes, and only data makes it longer.
    for op in [READ, WRITE] {
        assert_eq!(bench.run(op, 8192, 2048, Some(part(2048))).unwrap_err(), IoError::Unsupported);
        assert_eq!(bench.run(op, 8192, 1024, Some(part(1024))).unwrap_err(), IoError::Medium);
    }
    assert_eq!(std::fs::read(&path).unwrap(), pattern(10_000, 1));
}

#[test]
fn a_file_that_is_not_whole_blocks_becomes_longer_only_by_data_beyond_its_end() {
    for block in [512, 4096] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, pattern(10_001, 3)).unwrap();
        let blocks = BlockSizes { logical: Some(block), physical: None };
        let options = FileOptions { blocks, ..FileOptions::default() };
        let volume = FileVolume::open(&path, options).unwrap();
        assert!(!volume.is_direct(), "direct I/O could only write the whole block");
        let (size, block) = (volume.info().size, u64::from(block));
        let mut bench = Bench::new(&volume);
        let last = size - block;
        let tail = (10_001 - last) as usize;
        let mut padded = vec![9; block as usize];
        padded[tail..].fill(0);
        bench.write(last, &padded);
        bench.write(0, &[vec![5; last as usize], padded.clone()].concat());
        assert_eq!(bench.read(last, block), padded);
        for (op, byte) in [(ZERO, 0), (PUNCH, 0), (Op::Write { fua: true }, 8)] {
            match op {
                Op::Write { .. } => {
                    padded[..tail].fill(byte);
                    let data = SgList::one(Seg::from_slice(&padded));
                    bench.run(op, last, block, Some(data)).map(drop).unwrap();
                }
                _ => bench.zero(op, last, block).map(drop).unwrap(),
            }
            padded[..tail].fill(byte);
            assert_eq!(bench.read(last, block), padded);
        }
        let content = std::fs::read(&path).unwrap();
        assert!(content.len() == 10_001 && content[last as usize..] == padded[..tail]);
        // Data beyond the end, and zeroes over it later.
        padded[block as usize - 1] = 1;
        bench.write(last, &padded);
        assert_eq!(path.metadata().unwrap().len(), size);
        padded[block as usize - 1] = 0;
        bench.write(last, &padded);
        assert_eq!(bench.read(last, block), padded);
        drop(bench);
        assert_eq!(std::fs::read(&path).unwrap()[last as usize..], padded);
    }
}

#[test]
fn a_read_only_volume_reads_beside_a_writer_and_refuses_to_write() {
    let mut writer = Bench::on_new_file(false);
    writer.write(0, &[5; 4096]);
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let volume = FileVolume::open(writer.path(), options).unwrap();
    assert!(volume.info().read_only);
    let mut reader = Bench::new(&volume);
    assert_eq!(reader.read(0, 4096), [5; 4096]);
    for op in [PUNCH, ZERO, Op::Discard { fua: false }] {
        assert_eq!(reader.zero(op, 0, 4096).unwrap_err(), IoError::ReadOnly);
    }
    reader.run(Op::Flush, 0, 0, None).unwrap();
}

#[test]
fn empty_requests_and_prefetches_complete() {
    for direct in [false, true] {
        let mut bench = Bench::on_new_file(direct);
        assert!(bench.read(4096, 0).is_empty());
        bench.run(WRITE, 0, 0, Some(SgList::default())).unwrap();
        bench.zero(PUNCH, 4096, 0).unwrap();
        bench.run(Op::Prefetch, 0, SIZE, None).unwrap();
        assert_eq!(bench.run(READ, SIZE, 4096, None).unwrap_err(), IoError::OutOfRange);
    }
}

#[test]
fn a_channel_and_its_core_may_be_dropped_with_io_in_flight() {
    for direct in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let volume = open(&folder.path().join("disk"), direct);
        let mut bench = Bench::new(&volume);
        for nth in 0..u64::from(DEPTH) / 2 {
            bench.submit(READ, nth << 20, 1 << 20, None);
            bench.submit(STABLE_WRITE, nth << 20, 4096, Some(SgList::one(Seg::from_slice(&[1; 4096]))));
        }
        let Bench { channel, reactor, .. } = bench;
        let (pool, in_flight) = (reactor.core().pool().clone(), (DEPTH as usize / 2) << 20);
        drop(channel);
        // The kernel may still write there.
        assert!(pool.out_bytes() >= in_flight);
        drop(reactor);
        assert_eq!(pool.out_bytes(), 0);
    }
}

/// A file system of its own, unmounted on drop.
struct Mount(TempDir);

impl Mount {
    fn tmpfs(options: &str) -> Option<Mount> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        let output = mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder.path()).output();
        output.is_ok_and(|output| output.status.success()).then_some(Mount(folder))
    }

    /// A new file system on a device.
    fn ext4(device: &Path) -> Option<Mount> {
        let folder = tempfile::tempdir().unwrap();
        let made = Command::new("mkfs.ext4").arg("-q").arg(device).output();
        let mounts = made.is_ok_and(|output| output.status.success());
        let output = mounts.then(|| Command::new("mount").arg(device).arg(folder.path()).output())?;
        output.is_ok_and(|output| output.status.success()).then_some(Mount(folder))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The path is unmounted at once, and the file system once the volume is closed.
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_file_system_is_an_error_until_space_is_freed() {
    let Some(mount) = Mount::tmpfs("size=1m") else {
        return skip("a full file system", "only root may mount one");
    };
    let mut bench = Bench::new(&open(&mount.0.path().join("disk"), false));
    bench.write(0, &[1; 512 << 10]);
    let data = SgList::one(Seg::from_slice(&vec![2; 4 << 20]));
    assert_eq!(bench.run(WRITE, 1 << 20, 4 << 20, Some(data)).unwrap_err(), IoError::NoSpace);
    bench.zero(PUNCH, 0, SIZE).unwrap();
    bench.write(0, &[3; 4096]);
    bench.run(Op::Flush, 0, 0, None).unwrap();
}

#[test]
fn zeroes_are_written_where_the_file_system_cannot_zero_a_range() {
    let Some(mount) = Mount::tmpfs("size=16m") else {
        return skip("a file system without FALLOC_FL_ZERO_RANGE", "only root may mount one");
    };
    let mut bench = Bench::new(&open(&mount.0.path().join("disk"), false));
    bench.write(0, &[1; 4 << 20]);
    let only_fast = Op::WriteZeroes { fua: false, may_unmap: false, only_fast: true };
    assert_eq!(bench.zero(only_fast, 512, 3 << 20).unwrap_err(), IoError::Unsupported);
    assert!(all_are(&bench.read(0, 4 << 20), 1));
    bench.zero(STABLE_ZERO, 512, 3 << 20).unwrap();
    let (bytes, end) = (bench.read(0, 4 << 20), 512 + (3 << 20));
    assert!(all_are(&bytes[512..end], 0));
    assert!(all_are(&bytes[..512], 1) && all_are(&bytes[end..], 1));
}

/// A loop device over a new file, detached on drop.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(folder: &Path) -> Option<LoopDevice> {
        LoopDevice::with_blocks(folder, 512)
    }

    fn with_blocks(folder: &Path, block: u32) -> Option<LoopDevice> {
        let file = folder.join("disk");
        File::create(&file).unwrap().set_len(SIZE).unwrap();
        let block = format!("--sector-size={block}");
        let output = Command::new("losetup").args(["--find", "--show", &block]).arg(&file).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| LoopDevice(PathBuf::from(name.trim())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).output();
    }
}

#[test]
fn a_block_device_works_as_a_volume() {
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = LoopDevice::new(folder.path()) else {
        return skip("a block device", "only root may make a loop device");
    };
    assert!(matches!(FileVolume::open(&device.0, FileOptions::default()), Err(OpenError::IsDevice(_))));
    for direct in [None, Some(false)] {
        let options = BlockOptions { direct, ..BlockOptions::default() };
        let volume = FileVolume::open_block(&device.0, options).unwrap();
        assert!(matches!(
            FileVolume::open_block(&device.0, options),
            Err(OpenError::InUse(_) | OpenError::Locked(_))
        ));
        let info = volume.info();
        assert_eq!((info.size, info.logical_block, volume.is_direct()), (SIZE, 512, direct.is_none()));
        let mut bench = Bench::new(&volume);
        let bytes = pattern(1 << 20, 5);
        bench.write(1 << 20, &bytes);
        bench.run(STABLE_WRITE, 0, 512, Some(SgList::one(Seg::from_slice(&[9; 512])))).unwrap();
        bench.run(Op::Flush, 0, 0, None).unwrap();
        assert!(bench.read(1 << 20, 1 << 20) == bytes);
        assert_eq!(bench.extents(0, SIZE), [Extent { len: SIZE, hole: false, zero: false }]);
        bench.zero(PUNCH, 1 << 20, 1 << 19).unwrap();
        bench.zero(ZERO, 3 << 19, 1 << 19).unwrap();
        assert!(all_are(&bench.read(1 << 20, 1 << 20), 0));
        bench.zero(Op::Discard { fua: true }, 0, SIZE).unwrap();
        bench.run(Op::Prefetch, 0, SIZE, None).unwrap();
    }
}

#[test]
fn once_writes_are_lost_every_flush_fails_until_the_volume_is_opened_again() {
    // A device whose storage is full accepts writes into the page cache, and loses them in the
    // write-back.
    let device = Mount::tmpfs("size=1m").and_then(|mount| Some((LoopDevice::new(mount.0.path())?, mount)));
    let Some((device, _mount)) = device else {
        return skip("a device that loses writes", "only root may make one");
    };
    let options = BlockOptions { direct: Some(false), ..BlockOptions::default() };
    let volume = FileVolume::open_block(&device.0, options).unwrap();
    let (mut bench, mut other) = (Bench::new(&volume), Bench::new(&volume));
    bench.run(Op::Flush, 0, 0, None).unwrap();
    bench.write(0, &pattern(4 << 20, 6));
    let first = bench.run(Op::Flush, 0, 0, None).unwrap_err();
    assert!(matches!(first, IoError::NoSpace | IoError::Medium), "{first}");
    for bench in [&mut bench, &mut other] {
        assert_eq!(bench.run(Op::Flush, 0, 0, None).unwrap_err(), IoError::Medium);
        let data = SgList::one(Seg::from_slice(&[1; 512]));
        assert_eq!(bench.run(STABLE_WRITE, 0, 512, Some(data)).unwrap_err(), IoError::Medium);
    }
    drop((bench, other, volume));
    let again = FileVolume::open_block(&device.0, options).unwrap();
    Bench::new(&again).run(Op::Flush, 0, 0, None).unwrap();
}

#[test]
fn a_file_conforms_buffered_and_direct() {
    for direct in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let volume = open(&path, direct);
        let frozen =
            FileOptions { read_only: true, direct: Some(volume.is_direct()), ..FileOptions::default() };
        let read_only = FileVolume::open(&path, frozen).unwrap();
        conforms(Arc::new(volume), Some(Arc::new(read_only)));
    }
}

/// Blocks of 4096 bytes, as of a 4Kn disk.
const LARGE: BlockSizes = BlockSizes { logical: Some(4096), physical: None };

#[test]
fn a_file_with_large_blocks_conforms_and_ends_with_a_whole_one() {
    for direct in [Some(false), None] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(SIZE + 512).unwrap();
        let options = FileOptions { direct, blocks: LARGE, ..FileOptions::default() };
        let volume = FileVolume::open(&path, options).unwrap();
        let info = volume.info();
        assert_eq!((info.size, info.logical_block), (SIZE + 4096, 4096));
        assert!(info.physical_block >= 4096 && info.discard_granularity.is_multiple_of(4096), "{info:?}");
        conforms(Arc::new(volume), None);
    }
}

#[test]
fn a_file_presents_small_blocks_within_large_ones() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = BlockSizes { logical: Some(512), physical: Some(16384) };
    let options =
        FileOptions { size: Some(SIZE), direct: Some(false), create: true, blocks, ..FileOptions::default() };
    let volume = FileVolume::open(folder.path().join("disk"), options).unwrap();
    let info = volume.info();
    assert_eq!((info.logical_block, info.physical_block, info.preferred_block), (512, 16384, 16384));
}

#[test]
fn a_4kn_device_refuses_smaller_blocks_and_a_file_on_it_uses_direct_io_with_equal_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = LoopDevice::with_blocks(folder.path(), 4096) else {
        return skip("a 4Kn device", "only root may make a loop device");
    };
    let open = |blocks| FileVolume::open_block(&device.0, BlockOptions { blocks, ..BlockOptions::default() });
    for blocks in [BlockSizes::default(), LARGE] {
        let volume = open(blocks).unwrap();
        assert_eq!((volume.info().logical_block, volume.is_direct()), (4096, true));
    }
    let small = BlockSizes { logical: Some(512), physical: None };
    let refused = open(small).map(|_| ()).unwrap_err().to_string();
    assert!(refused.ends_with("write block_size=4096, or leave it out"), "{refused}");
    let Some(mount) = Mount::ext4(&device.0) else { return skip("a file on it", "only root may mount one") };
    let path = mount.0.path().join("disk");
    let open = |blocks, direct| {
        let options =
            FileOptions { size: Some(1 << 20), create: true, blocks, direct, ..FileOptions::default() };
        FileVolume::open(&path, options)
    };
    assert!(!open(BlockSizes::default(), None).unwrap().is_direct(), "its clients may write 512 bytes");
    assert!(open(LARGE, None).unwrap().is_direct());
    let refused = open(small, Some(true)).map(|_| ()).unwrap_err().to_string();
    assert!(
        refused.contains("block_size=512 is less than the volume's own block size of 4096 bytes"),
        "{refused}"
    );
}

#[test]
fn a_block_device_conforms_buffered_and_direct() {
    for direct in [false, true] {
        // In memory, because a flush of a loop device flushes the file system below it.
        let mount = Mount::tmpfs("size=80m");
        let device = mount.as_ref().and_then(|mount| LoopDevice::new(mount.0.path()));
        let Some(device) = device else {
            return skip("a block device", "only root may make a loop device");
        };
        let options = BlockOptions { direct: Some(direct), ..BlockOptions::default() };
        let volume = FileVolume::open_block(&device.0, options).unwrap();
        let frozen = BlockOptions { read_only: true, ..options };
        let read_only = FileVolume::open_block(&device.0, frozen).unwrap();
        conforms(Arc::new(volume), Some(Arc::new(read_only)));
    }
}

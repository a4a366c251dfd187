//! Images of Ceph RBD as volumes, by functions in the place of librbd's: without a cluster, and
//! with requests that complete as a test chooses. `rbd_volume.rs` has the tests with a cluster.

mod conforms;

use blockmux_engine::volume::rbd::{ImageName, RadosState, RbdOwnership, RbdVolume};
use blockmux_proto::volume_state::Ownership;
use blockmux_rbd::fake::FakeImage;
use blockmux_volume::{Io, IoError, Op, Output, Seg, Tag, Volume};
use conforms::{conforms, harness};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};

const MIB: u64 = 1 << 20;

fn volume(image: &FakeImage, has_cache: bool) -> Arc<RbdVolume> {
    Arc::new(RbdVolume::of_image(image.open(has_cache), &image_name(), Arc::default()))
}

fn image_name() -> ImageName {
    let (pool, image) = ("rbd".to_owned(), "fake".to_owned());
    ImageName { pool, namespace: None, image, snapshot: None }
}

fn write(tag: u64, offset: u64, byte: u8, fua: bool) -> Io {
    let data = Some(Seg::from_slice(&[byte; 512]).into());
    Io { data, ..Io::new(Tag(tag), Op::Write { fua }, offset, 512) }
}

fn compare(tag: u64, expected: u8, new: u8) -> Io {
    let data = Some(Seg::from_slice(&[[expected; 512], [new; 512]].concat()).into());
    Io { data, ..Io::new(Tag(tag), Op::CompareAndWrite { fua: true }, 512, 512) }
}

#[test]
fn an_image_conforms_with_and_without_a_cache() {
    for has_cache in [false, true] {
        conforms(volume(&FakeImage::new(64 << 20), has_cache), None);
    }
}

#[test]
fn a_request_that_is_cancelled_completes_when_librbd_has_done_it() {
    let image = FakeImage::new(1 << 20);
    let mut client = harness(volume(&image, false)).client(4).unwrap();
    image.hold(true);
    client.submit(write(1, 0, 1, false));
    client.submit(write(2, 512, 2, false));
    client.cancel(Tag(1));
    assert_eq!((image.pending(), client.in_flight()), (2, 2));
    image.complete(1, None, usize::MAX);
    assert_eq!(client.wait().unwrap().tag, Tag(2));
    image.complete(0, None, usize::MAX);
    let done = client.wait().unwrap();
    assert!(done.tag == Tag(1) && done.result.is_ok());
    assert_eq!(image.content()[..1024], [[1; 512], [2; 512]].concat());
}

#[test]
fn channels_continue_with_the_image_of_another_client_once_theirs_is_blocklisted() {
    let image = FakeImage::new(1 << 20);
    let volume = volume(&image, false);
    let ownership = RbdOwnership::new(volume.clone(), RadosState::unowned(), || {});
    let lost = Arc::new(AtomicU32::new(0));
    let counted = lost.clone();
    ownership.on_lost(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let mut client = harness(volume.clone()).client(4).unwrap();
    image.hold(true);
    client.submit(Io::new(Tag(1), Op::Read, 0, 512));
    client.submit(write(2, 0, 2, false));
    image.complete(1, Some(libc::ESHUTDOWN), 0);
    let done = client.wait().unwrap();
    assert_eq!((done.tag, done.result.err()), (Tag(2), Some(IoError::Fenced)));
    client.submit(write(3, 0, 3, false));
    assert_eq!(client.wait().unwrap().result.err(), Some(IoError::Fenced));
    assert_eq!(lost.load(Ordering::Relaxed), 1, "it is told once");
    let again = FakeImage::new(1 << 20);
    volume.replace_image(1, again.open(false), &image_name(), Arc::default()).unwrap();
    client.submit(write(4, 0, 4, false));
    assert!(client.wait().unwrap().result.is_ok());
    assert_eq!((&again.content()[..512], image.content()[0]), (&[4; 512][..], 0));
    // What was submitted before completes, without harm to the new image.
    image.complete(0, Some(libc::ESHUTDOWN), 0);
    let done = client.wait().unwrap();
    assert_eq!((done.tag, done.result.err()), (Tag(1), Some(IoError::Fenced)));
    assert_eq!(client.read(0, 512).unwrap(), [4; 512]);
    assert_eq!(lost.load(Ordering::Relaxed), 1);
}

#[test]
fn a_request_that_is_refused_for_want_of_the_lock_asks_who_has_it() {
    let image = FakeImage::new(1 << 20);
    let volume = volume(&image, false);
    let ownership = RbdOwnership::new(volume.clone(), RadosState::unowned(), || {});
    let (asked, is_asked) = mpsc::channel();
    let (answer, answered) = mpsc::channel::<()>();
    let answered = Mutex::new(answered);
    ownership.on_refused(move || {
        asked.send(()).unwrap();
        answered.lock().unwrap().recv().unwrap();
    });
    let mut client = harness(volume).client(4).unwrap();
    image.refuse(Some(libc::EIO));
    client.submit(write(1, 0, 1, false));
    assert_eq!(client.wait().unwrap().result.err(), Some(IoError::Medium));
    image.refuse(Some(libc::EROFS));
    // The core does not wait for the answer, and one question is enough.
    for tag in [2, 3] {
        client.submit(write(tag, 0, 1, false));
        assert_eq!(client.wait().unwrap().result.err(), Some(IoError::Fenced));
    }
    is_asked.recv().unwrap();
    assert!(is_asked.try_recv().is_err());
    answer.send(()).unwrap();
}

#[test]
fn a_client_that_reservations_refuse_has_the_cluster_asked_unless_it_does_not_answer() {
    let volume = volume(&FakeImage::new(1 << 20), false);
    let ownership = RbdOwnership::new(volume, RadosState::unowned(), || {});
    let (asked, is_asked) = mpsc::channel();
    ownership.on_refused(move || asked.send(()).unwrap());
    let pending = ownership.question();
    ownership.recheck();
    assert!(is_asked.try_recv().is_err());
    drop(pending);
    ownership.recheck();
    is_asked.recv().unwrap();
}

#[test]
fn a_question_who_owns_an_image_keeps_only_the_image() {
    let volume = volume(&FakeImage::new(1 << 20), false);
    let ownership = RbdOwnership::new(volume.clone(), RadosState::unowned(), || {});
    let (question, kept) = (ownership.question(), Arc::downgrade(&volume));
    drop((ownership, volume));
    assert_eq!(kept.strong_count(), 0, "a takeover waits for the volume");
    drop(question);
}

#[test]
fn errors_and_short_reads_are_those_of_volumes() {
    let image = FakeImage::new(1 << 20);
    let mut client = harness(volume(&image, false)).client(4).unwrap();
    image.hold(true);
    let errors = [
        (libc::ENOSPC, IoError::NoSpace),
        (libc::EROFS, IoError::Fenced),
        (libc::EINVAL, IoError::OutOfRange),
        (libc::ETIMEDOUT, IoError::PathLost),
        (libc::EIO, IoError::Medium),
    ];
    for (errno, expected) in errors {
        client.submit(write(1, 0, 1, false));
        image.complete(0, Some(errno), 0);
        assert_eq!(client.wait().unwrap().result.err(), Some(expected), "{errno}");
    }
    client.submit(Io::new(Tag(1), Op::Read, 0, 4096));
    image.complete(0, None, 4095);
    assert_eq!(client.wait().unwrap().result.err(), Some(IoError::OutOfRange));
    // librbd does not take a request.
    image.refuse(Some(libc::ENOMEM));
    assert_eq!(client.call(write(1, 0, 1, false)).unwrap().err(), Some(IoError::NoMemory));
    image.refuse(None);
    image.hold(false);
    client.write(0, &[3; 512]).unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [3; 512]);
}

#[test]
fn a_cache_is_flushed_after_a_forced_write_and_not_before() {
    let image = FakeImage::new(1 << 20);
    let mut client = harness(volume(&image, true)).client(4).unwrap();
    image.hold(true);
    client.submit(write(1, 0, 1, true));
    image.complete(0, None, usize::MAX);
    // The write has completed; its flush begins when the core takes notice.
    client.submit(write(2, 512, 2, false));
    image.complete(0, None, usize::MAX);
    assert_eq!(client.wait().unwrap().tag, Tag(2));
    assert_eq!((image.pending(), client.in_flight()), (1, 1));
    image.complete(0, Some(libc::EIO), 0);
    let done = client.wait().unwrap();
    assert_eq!((done.tag, done.result.err()), (Tag(1), Some(IoError::Medium)));
}

#[test]
fn a_compare_and_write_tells_where_it_differs_or_that_it_cannot_compare() {
    let image = FakeImage::new(1 << 20);
    let volume = volume(&image, true);
    let mut client = harness(volume.clone()).client(4).unwrap();
    assert!(matches!(client.call(compare(1, 0, 7)).unwrap(), Ok(Output::Nothing)));
    assert!(matches!(client.call(compare(1, 0, 8)).unwrap(), Ok(Output::Differs(0))));
    assert_eq!(image.content()[512..1024], [7; 512]);
    image.hold(true);
    client.submit(compare(1, 7, 8));
    image.complete(0, Some(libc::ENOSPC), 0);
    assert_eq!(client.wait().unwrap().result.err(), Some(IoError::NoSpace));
    assert_eq!(volume.info().compare_and_write_unit, 4096);
    // Old versions compare 512 bytes only, and some pools nothing.
    let two = Seg::from_slice(&[0; 2048]).into();
    let io = Io::new(Tag(1), Op::CompareAndWrite { fua: true }, 0, 1024);
    for (io, errno, unit) in
        [(Io { data: Some(two), ..io }, libc::EINVAL, 512), (compare(1, 7, 8), libc::EOPNOTSUPP, 0)]
    {
        client.submit(io);
        image.complete(0, Some(errno), 0);
        assert!(matches!(client.wait().unwrap().result, Ok(Output::NotCompared)), "{errno}");
        assert_eq!(volume.info().compare_and_write_unit, unit);
    }
}

#[test]
fn a_blocklisted_client_fails_its_writes_and_closing_ends_what_librbd_keeps() {
    let image = FakeImage::new(1 << 20);
    let volume = volume(&image, false);
    let mut client = harness(volume.clone()).client(4).unwrap();
    image.hold(true);
    client.submit(write(1, 0, 1, false));
    client.submit(Io::new(Tag(2), Op::Read, 0, 512));
    // Only the read learns of it; the write waits for the image's lock for ever.
    image.complete(1, Some(libc::ESHUTDOWN), 0);
    let mut failed = client.wait_all().unwrap();
    failed.sort_by_key(|done| done.tag);
    let errors: Vec<_> = failed.into_iter().map(|done| (done.tag, done.result.err())).collect();
    assert_eq!(errors, [1, 2].map(|tag| (Tag(tag), Some(IoError::Fenced))));
    assert_eq!(image.pending(), 1);
    assert_eq!(client.call(write(3, 0, 1, false)).unwrap().err(), Some(IoError::Fenced));
    assert_eq!(image.pending(), 1, "a blocklisted client sends nothing more");
    assert_eq!(volume.info().size, MIB);
    drop((client, volume));
    while !image.is_closed() {
        std::thread::yield_now();
    }
    assert_eq!((image.pending(), image.content()[..512].to_vec()), (0, vec![0; 512]));
}

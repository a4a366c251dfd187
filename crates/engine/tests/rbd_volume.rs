//! Images of Ceph RBD as volumes, on a real cluster, which `make test-cluster` starts.

mod ceph;
mod conforms;

use blockmux_engine::volume::rbd::{ClusterOptions, ImageName, RbdVolume};
use blockmux_volume::{Extent, Io, IoError, Op, Output, Resize, ResizeError, Tag, Volume};
use ceph::TestImage;
use conforms::{conforms, harness};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const POOL: &str = "rbd";

impl TestImage {
    fn image_name(&self) -> ImageName {
        ImageName { pool: POOL.to_owned(), namespace: None, image: self.name.clone(), snapshot: None }
    }

    fn cluster(&self) -> ClusterOptions {
        ClusterOptions { conf: Some(self.conf.clone()), ..ClusterOptions::new() }
    }

    fn open(&self, read_only: bool) -> RbdVolume {
        RbdVolume::open(&self.cluster(), &self.image_name(), read_only, || {}).unwrap()
    }
}

fn status(offset: u64, len: u64) -> Io {
    Io::new(Tag(1), Op::BlockStatus, offset, len)
}

#[test]
fn an_image_conforms() {
    let Some(image) = TestImage::new("conforms", &["--size", "64M"]) else { return };
    conforms(Arc::new(image.open(false)), Some(Arc::new(image.open(true))));
}

#[test]
fn an_image_without_an_object_map_conforms() {
    let features = ["--size", "64M", "--image-feature", "layering"];
    let Some(image) = TestImage::new("plain", &features) else { return };
    conforms(Arc::new(image.open(false)), None);
}

#[test]
fn an_image_with_small_objects_and_stripes_conforms() {
    let options = ["--size", "64M", "--object-size", "64K", "--stripe-unit", "16K", "--stripe-count", "4"];
    let Some(image) = TestImage::new("striped", &options) else { return };
    conforms(Arc::new(image.open(false)), None);
}

#[test]
fn an_image_whose_cache_is_on_says_so_and_conforms() {
    let Some(image) = TestImage::new("cached", &["--size", "40M"]) else { return };
    image.rbd(&["config", "image", "set", &image.name, "rbd_cache", "true"]);
    let volume = image.open(false);
    assert!(volume.info().write_cache);
    conforms(Arc::new(volume), None);
    image.rbd(&["config", "image", "set", &image.name, "rbd_skip_partial_discard", "false"]);
    image.rbd(&["config", "image", "rm", &image.name, "rbd_cache"]);
    let info = image.open(false).info();
    assert_eq!((info.write_cache, info.discard_granularity), (false, 512));
}

#[test]
fn a_snapshot_keeps_its_content_and_size_and_refuses_writes() {
    let Some(image) = TestImage::new("snapshot", &["--size", "8M"]) else { return };
    let volume = Arc::new(image.open(false));
    let mut client = harness(volume.clone()).client(4).unwrap();
    client.write(MIB, &[1; 4096]).unwrap();
    let name = format!("{}@then", image.name);
    image.rbd(&["snap", "create", "--no-progress", &name]);
    client.write(MIB, &[2; 4096]).unwrap();
    image.rbd(&["resize", "--no-progress", "--size", "16M", &image.name]);
    let snapshot = ImageName { snapshot: Some("then".to_owned()), ..image.image_name() };
    let then = Arc::new(RbdVolume::open(&image.cluster(), &snapshot, false, || {}).unwrap());
    assert_eq!((then.info().read_only, then.info().size), (true, 8 * MIB));
    assert_ne!(then.identity(), volume.identity());
    let mut reader = harness(then).client(4).unwrap();
    assert_eq!(reader.read(MIB, 4096).unwrap(), [1; 4096]);
    assert_eq!(client.read(MIB, 4096).unwrap(), [2; 4096]);
    let zero = Io::new(Tag(1), Op::Discard { fua: false }, 0, 4096);
    assert_eq!(reader.call(zero).unwrap().err(), Some(IoError::ReadOnly));
    // A snapshot that is open can be removed, but its image cannot.
    image.rbd(&["snap", "rm", "--no-progress", &name]);
    assert!(image.rbd_fails(&["rm", "--no-progress", &image.name]).contains("image still has watchers"));
}

#[test]
fn holes_are_found_by_the_object_map() {
    let Some(image) = TestImage::new("holes", &["--size", "64M"]) else { return };
    let mut client = harness(Arc::new(image.open(false))).client(4).unwrap();
    client.write(8 * MIB + 512, &[7; 512]).unwrap();
    let extents = |client: &mut blockmux_volume::conformance::Client, offset, len| match client
        .call(status(offset, len))
        .unwrap()
        .unwrap()
    {
        Output::Extents(extents) => extents,
        other => panic!("{other:?}"),
    };
    let hole = |len| Extent { len, hole: true, zero: true };
    assert_eq!(extents(&mut client, 0, 64 * MIB), [hole(8 * MIB), Extent::data(4 * MIB), hole(52 * MIB)]);
    assert_eq!(extents(&mut client, 9 * MIB, MIB), [Extent::data(MIB)]);
    assert_eq!(extents(&mut client, 11 * MIB, 2 * MIB), [Extent::data(MIB), hole(MIB)]);
    // Without a map nothing is known.
    image.rbd(&["feature", "disable", &image.name, "fast-diff", "object-map"]);
    assert_eq!(extents(&mut client, 0, 64 * MIB), [Extent::data(64 * MIB)]);
}

#[test]
fn a_size_that_changes_elsewhere_is_noticed_and_one_can_be_set() {
    let Some(image) = TestImage::new("sizes", &["--size", "8M"]) else { return };
    let volumes = [false, true].map(|read_only| image.open(read_only));
    image.rbd(&["resize", "--no-progress", "--size", "16M", &image.name]);
    for volume in &volumes {
        eventually(|| volume.refresh_size() == 16 * MIB);
    }
    let [volume, read_only] = volumes;
    assert_eq!(volume.resize(Resize::grow(24 * MIB)).unwrap(), 24 * MIB);
    eventually(|| read_only.refresh_size() == 24 * MIB);
    assert!(matches!(volume.resize(Resize::grow(8 * MIB)), Err(ResizeError::WouldLose { .. })));
    assert!(matches!(read_only.resize(Resize::grow(32 * MIB)), Err(ResizeError::ReadOnly)));
    assert!(matches!(volume.resize(Resize::grow(100)), Err(ResizeError::BadSize { .. })));
    assert_eq!(volume.resize(Resize::discard_beyond(8 * MIB)).unwrap(), 8 * MIB);
    let mut client = harness(Arc::new(volume)).client(4).unwrap();
    let beyond = client.call(Io::new(Tag(1), Op::Read, 8 * MIB, 512)).unwrap();
    assert_eq!(beyond.err(), Some(IoError::OutOfRange));
    // A user who may only read opens the image, too.
    let reader = ClusterOptions { user: "reader".to_owned(), ..image.cluster() };
    let volume = RbdVolume::open(&reader, &image.image_name(), true, || {}).unwrap();
    assert_eq!(volume.info().size, 8 * MIB);
    let refused = RbdVolume::open(&reader, &image.image_name(), false, || {});
    let said = refused.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(said.starts_with("client.reader may not open the image; give it the caps"), "{said}");
}

/// Asks until it is so; fails after a minute.
fn eventually(is_so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "it does not happen");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_is_blocklisted_is_fenced_and_the_next_image_is_not() {
    let Some(image) = TestImage::new("fenced", &["--size", "8M"]) else { return };
    // A connection of its own, because others share one.
    let options = ClusterOptions { timeout: Duration::from_secs(29), ..image.cluster() };
    let volume = RbdVolume::open(&options, &image.image_name(), false, || {}).unwrap();
    let mut client = harness(Arc::new(volume)).client(4).unwrap();
    client.write(0, &[1; 4096]).unwrap();
    image.blocklist(&image.watcher());
    let write = || Io {
        data: Some(blockmux_volume::Seg::from_slice(&[2; 4096]).into()),
        ..Io::new(Tag(1), Op::Write { fua: false }, 0, 4096)
    };
    // The storage daemons learn of it one after the other.
    let mut result = client.call(write()).unwrap();
    for _ in 0..10_000 {
        if result.is_err() {
            break;
        }
        result = client.call(write()).unwrap();
    }
    assert_eq!(result.err(), Some(IoError::Fenced));
    let again = RbdVolume::open(&options, &image.image_name(), false, || {}).unwrap();
    let mut other = harness(Arc::new(again)).client(4).unwrap();
    other.write(0, &[3; 4096]).unwrap();
    assert_eq!(other.read(0, 4096).unwrap(), [3; 4096]);
    assert_eq!(client.call(write()).unwrap().err(), Some(IoError::Fenced));
}

/// A compare and write of a block with others.
fn compare_and_write(offset: u64, expected: &[u8], new: &[u8]) -> Io {
    let data = Some(blockmux_volume::Seg::from_slice(&[expected, new].concat()).into());
    Io { data, ..Io::new(Tag(1), Op::CompareAndWrite { fua: true }, offset, expected.len() as u64) }
}

#[test]
fn a_range_is_compared_and_written_by_the_cluster_itself() {
    let striped = ["--size", "16M", "--object-size", "64K", "--stripe-unit", "16K", "--stripe-count", "4"];
    for (name, options, unit) in [("compared", &["--size", "16M"][..], 65_536), ("stripes", &striped, 8192)] {
        let Some(image) = TestImage::new(name, options) else { return };
        let volume = Arc::new(image.open(false));
        assert_eq!(volume.info().compare_and_write_unit, unit);
        let mut client = harness(volume.clone()).client(4).unwrap();
        let mut call = |io| client.call(io).unwrap();
        // librbd before Ceph 18 compares only within 512 bytes, which the volume finds out.
        let whole = call(compare_and_write(MIB, &vec![0; unit as usize], &vec![3; unit as usize])).unwrap();
        let len = match whole {
            Output::Nothing => unit as usize,
            Output::NotCompared => 512,
            other => panic!("{other:?}"),
        };
        assert_eq!(volume.info().compare_and_write_unit as usize, len);
        for offset in [0, 8 * MIB + u64::from(unit)] {
            // What was never written reads as zeroes.
            let (mut content, mut next) = (vec![0; len], 0);
            for _ in 0..2 {
                for at in [0, 511, len - 512, len - 1] {
                    let mut wrong = content.clone();
                    wrong[at] ^= 1;
                    let outcome = call(compare_and_write(offset, &wrong, &vec![9; len])).unwrap();
                    assert!(
                        matches!(outcome, Output::Differs(found) if found == at as u64),
                        "{at}: {outcome:?}"
                    );
                }
                next += 1;
                let outcome = call(compare_and_write(offset, &content, &vec![next; len])).unwrap();
                assert!(matches!(outcome, Output::Nothing), "{outcome:?}");
                content = call(Io::new(Tag(1), Op::Read, offset, len as u64)).unwrap().into_data().to_vec();
                assert_eq!(content, vec![next; len]);
            }
        }
        let beyond_a_unit = compare_and_write(u64::from(unit) - 512, &[0; 1024], &[0; 1024]);
        assert_eq!(call(beyond_a_unit).err(), Some(IoError::Unsupported));
    }
}

#[test]
fn compare_and_writes_of_two_connections_to_one_image_lose_nothing() {
    let Some(image) = TestImage::new("counter", &["--size", "8M"]) else { return };
    let count = |timeout| {
        // Different options are different connections, as those of two machines.
        let options = ClusterOptions { timeout: Duration::from_secs(timeout), ..image.cluster() };
        let name = image.image_name();
        std::thread::spawn(move || {
            let volume = RbdVolume::open(&options, &name, false, || {}).unwrap();
            let mut client = harness(Arc::new(volume)).client(4).unwrap();
            let mut counted = 0;
            while counted < EACH {
                let before = client.read(4096, 512).unwrap();
                let number = u64::from_le_bytes(before[..8].try_into().unwrap()) + 1;
                let mut after = before.clone();
                after[..8].copy_from_slice(&number.to_le_bytes());
                match client.call(compare_and_write(4096, &before, &after)).unwrap().unwrap() {
                    Output::Nothing => counted += 1,
                    Output::Differs(at) => assert!(at < 8, "{at}"),
                    other => panic!("{other:?}"),
                }
            }
        })
    };
    const EACH: u64 = 100;
    let mut client = harness(Arc::new(image.open(false))).client(4).unwrap();
    client.write(4096, &[0; 512]).unwrap();
    let counting = [count(27), count(28)];
    counting.into_iter().for_each(|thread| thread.join().unwrap());
    let count = client.read(4096, 512).unwrap();
    assert_eq!(u64::from_le_bytes(count[..8].try_into().unwrap()), 2 * EACH);
}

#[test]
fn an_image_that_does_not_open_for_lack_of_storage_daemons_says_so() {
    let Some(image) = TestImage::new("unavailable", &["--size", "8M"]) else { return };
    let options = ClusterOptions { timeout: Duration::from_secs(1), ..image.cluster() };
    for number in ["1", "2"] {
        image.osd("kill", number);
    }
    // The monitors learn of it after some seconds.
    let is_known = || {
        let opened = RbdVolume::open(&options, &image.image_name(), false, || {});
        let said = opened.err().map(|error| error.to_string()).unwrap_or_default();
        said.starts_with(
            "the image does not open within 2 s, while 1 of 3 storage daemons of the cluster run;",
        )
    };
    eventually(is_known);
    for number in ["1", "2"] {
        image.osd("start", number);
    }
    eventually(|| RbdVolume::open(&options, &image.image_name(), false, || {}).is_ok());
}

#[test]
fn what_cannot_be_opened_is_said_with_what_to_do() {
    let Some(image) = TestImage::new("errors", &["--size", "8M"]) else { return };
    let name = image.image_name();
    let refusal = |options: &ClusterOptions, name: &ImageName| {
        RbdVolume::open(options, name, false, || {}).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let cluster = image.cluster();
    let no_pool = ImageName { pool: "none".to_owned(), ..name.clone() };
    assert_eq!(refusal(&cluster, &no_pool), "there is no pool none; list pools with 'ceph osd pool ls'");
    let none = ImageName { image: "none".to_owned(), ..name.clone() };
    assert_eq!(
        refusal(&cluster, &none),
        format!("there is no image none in {POOL}; list images with 'rbd ls {POOL}'")
    );
    let nowhere = ImageName { namespace: Some("ns".to_owned()), ..name.clone() };
    assert!(refusal(&cluster, &nowhere).contains(&format!("in {POOL}/ns; list")));
    let no_snapshot = ImageName { snapshot: Some("never".to_owned()), ..name.clone() };
    assert_eq!(
        refusal(&cluster, &no_snapshot),
        "the image has no snapshot never; list snapshots with 'rbd snap ls'"
    );
    let stranger = ClusterOptions { user: "stranger".to_owned(), ..image.cluster() };
    let said = refusal(&stranger, &name);
    assert!(said.starts_with("the cluster refuses client.stranger: Permission denied"), "{said}");
    let no_keyring = ClusterOptions { keyring: Some("/nonexistent".into()), ..image.cluster() };
    let said = refusal(&no_keyring, &name);
    assert!(said.contains("client.admin") && said.contains("id=") && said.contains("keyring"), "{said}");
    let keyring = image.conf.with_file_name("forged");
    std::fs::write(&keyring, "[client.admin]\nkey = AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==\n").unwrap();
    let forged = ClusterOptions { keyring: Some(keyring), ..image.cluster() };
    let said = refusal(&forged, &name);
    assert!(said.starts_with("the cluster refuses client.admin: "), "{said}");
    // Nobody answers at port 1.
    let conf = image.conf.with_file_name("nobody.conf");
    let text = "[global]\nmon host = v2:127.0.0.1:1/0\nauth client required = none\n";
    std::fs::write(&conf, text).unwrap();
    let nobody = ClusterOptions { conf: Some(conf), timeout: Duration::from_secs(1), ..image.cluster() };
    let said = refusal(&nobody, &name);
    assert_eq!(
        said,
        "no monitor of the cluster answers within 1 s: v2:127.0.0.1:1/0; are they reachable, and have they a quorum?"
    );
}

//! Tests with specs as people write them.

use super::*;
use crate::fault::{FaultEffect, FaultWhen};
use crate::io::IoError;
use crate::kind::{OpKind, OpSet};
use crate::limiter::Limit;
use crate::stripe::DEFAULT_CHUNK;
use proptest::prelude::*;
use std::ffi::OsString;
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

fn parse(text: &str) -> Spec {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn file(path: &str) -> FileSpec {
    FileSpec::new(path.into())
}

fn null(size: u64) -> Spec {
    Spec::Null(NullSpec::new(size))
}

#[test]
fn each_kind_is_parsed() {
    let mem = || Box::new(Spec::Mem(MemSpec::new(1 << 30)));
    assert_eq!(parse("mem:1GiB"), *mem());
    assert_eq!(parse("mem:1g?populate=on"), *mem());
    assert_eq!(parse("mem:1g?populate=off"), Spec::Mem(MemSpec { populate: false, ..MemSpec::new(1 << 30) }));
    assert_eq!(parse("null:64k"), null(65536));
    assert_eq!(parse("file:disk.img"), Spec::File(file("disk.img")));
    let whole = FileSpec { size: Some(1 << 30), direct: Some(false), read_only: true, ..file("/a b:c") };
    assert_eq!(parse("file:/a b:c?size=1g&direct=off&readonly=on"), Spec::File(whole));
    let shared = FileSpec { mode: Some(0o640), ..file("a") };
    assert_eq!(parse("file:a?mode=0640"), Spec::File(shared.clone()));
    assert_eq!(parse("file:a?mode=640"), Spec::File(shared));
    for wrong in ["rw", "0888", "1777", "64", "00640", "+640", ""] {
        assert!(format!("file:a?mode={wrong}").parse::<Spec>().is_err(), "{wrong}");
    }
    let block = BlockSpec {
        path: "/dev/sda".into(),
        direct: Some(true),
        read_only: false,
        is_raw: true,
        blocks: BlockSizes::default(),
    };
    assert_eq!(parse("block:/dev/sda?direct=on&readonly=off&format=raw"), Spec::Block(block));
    let delays = |read, write| {
        let (read, write) = (Duration::from_micros(read), Duration::from_micros(write));
        crate::Delays { read, write, flush: write }
    };
    assert_eq!(parse("delay:100us:mem:1g"), Spec::Decorated(Decoration::Delay(delays(100, 100)), mem()));
    assert_eq!(parse("delay:100us,5ms:mem:1g"), Spec::Decorated(Decoration::Delay(delays(100, 5000)), mem()));
    let limits = Limits {
        total: Limit { iops: NonZeroU64::new(1000), bytes_per_s: NonZeroU64::new(100 << 20) },
        read: Limit::default(),
        write: Limit { iops: NonZeroU64::new(7), bytes_per_s: None },
        burst: Duration::from_millis(500),
    };
    assert_eq!(
        parse("rate:iops=1000,bw=100m,write_iops=7,burst=500ms:mem:1g"),
        Spec::Decorated(Decoration::Rate(limits), mem())
    );
    assert_eq!(parse("log:-:mem:1g"), Spec::Decorated(Decoration::Log(LogTarget::Stderr), mem()));
    assert_eq!(
        parse("log:/var/a%3Ab:mem:1g"),
        Spec::Decorated(Decoration::Log(LogTarget::File("/var/a:b".into())), mem())
    );
    for url in ["nbd://[::1]:10809/disk?x=a,b:c", "nbd+unix:///export?socket=/run/x"] {
        assert_eq!(parse(url), Spec::Url(Url::new(url)));
    }
    assert_eq!(parse("[mem:1g]"), *mem());
}

#[test]
fn every_kind_takes_block_sizes() {
    let blocks = |logical, physical| BlockSizes { logical, physical };
    let large = blocks(Some(4096), None);
    assert_eq!(
        parse("mem:1g?block_size=4096"),
        Spec::Mem(MemSpec { blocks: large, ..MemSpec::new(1 << 30) })
    );
    let both = NullSpec { size: 1 << 30, blocks: blocks(Some(512), Some(4096)) };
    assert_eq!(parse("null:1g?physical_block_size=4k&block_size=512"), Spec::Null(both));
    assert_eq!(
        parse("file:a?size=1g&block_size=4k"),
        Spec::File(FileSpec { size: Some(1 << 30), blocks: large, ..file("a") })
    );
    for text in [
        "mem:1g?populate=off&block_size=4k",
        "file:a?format=raw&block_size=512&physical_block_size=4k",
        "block:/dev/sdb?direct=off&block_size=64k",
        "vhost-user:/run/a.sock?readonly=on&reconnect=5s&timeout=0s&block_size=4k",
        "rbd:pool/disk?readonly=on&timeout=5s&block_size=4k",
        "rbd:pool/disk?exclusive=on&timeout=5s",
        "rbd:pool/disk?exclusive=take",
        "rbd:pool/disk?exclusive=standby",
        "rbd:pool/disk?exclusive=group",
        "stripe:mem:1g?block_size=4k,null:1g?physical_block_size=4k",
        "delay:1ms:slice:0,1g:file:a?block_size=4k",
    ] {
        assert_eq!(parse(text).to_string(), text);
    }
    let Spec::Url(url) = parse("nbd://h/x?timeout=1s&block_size=4096") else { panic!("no URL") };
    assert_eq!(url.block_sizes(), Ok(large));
    assert_eq!(url.to_string(), "nbd://h/x?timeout=1s&block_size=4096");
    assert_eq!(url.without_block_sizes(), Url::new("nbd://h/x?timeout=1s"));
}

#[test]
fn an_image_of_ceph_is_named_as_ceph_does() {
    let image = RbdSpec::new("pool".to_owned(), "disk".to_owned());
    assert_eq!(parse("rbd:pool/disk"), Spec::Rbd(image.clone()));
    let whole = RbdSpec {
        namespace: Some("ns".to_owned()),
        snapshot: Some("mon@day".to_owned()),
        id: Some("backup".to_owned()),
        conf: Some("/etc/ceph/other.conf".into()),
        keyring: Some("/etc/a&b".into()),
        ..image
    };
    let text = "rbd:pool/ns/disk@mon%40day?id=backup&conf=/etc/ceph/other.conf&keyring=/etc/a%26b";
    assert_eq!(parse(text), Spec::Rbd(whole));
    assert_eq!(parse(text).to_string(), text);
}

#[test]
fn a_slice_has_an_offset_and_perhaps_a_length() {
    let slice = |offset, len| Spec::Slice(SliceSpec { offset, len }, Box::new(parse("file:a")));
    assert_eq!(parse("slice:1m,10g:file:a"), slice(1 << 20, Some(10 << 30)));
    assert_eq!(parse("slice:0:file:a"), slice(0, None));
    assert_eq!(parse("slice:512:file:a").to_string(), "slice:512:file:a");
    let members = "stripe:[slice:0,1g:file:a],[slice:1g,1g:file:a]";
    assert_eq!(parse(members).to_string(), members);
    let leaves: Vec<_> = parse("slice:1k:slice:1k:file:a").leaves().into_iter().cloned().collect();
    assert_eq!(leaves, [parse("file:a")]);
}

#[test]
fn a_fault_is_parsed() {
    let ops = OpSet::NONE.with(OpKind::Read).with(OpKind::WriteZeroes);
    let fault = Fault {
        ops,
        offset: 1 << 20,
        size: Some(4096),
        when: FaultWhen::PerMillion(2500),
        effect: FaultEffect::Fail(IoError::NoSpace),
        seed: 7,
    };
    let text = "fault:op=read+zeroes,offset=1m,size=4k,probability=0.0025,error=nospace,seed=7:null:1g";
    assert_eq!(parse(text), Spec::Decorated(Decoration::Fault(fault), Box::new(null(1 << 30))));
    let stuck = Fault { when: FaultWhen::Every(3), effect: FaultEffect::Stuck, ..Fault::default() };
    assert_eq!(
        parse("fault:every=3,error=stuck:null:1g"),
        Spec::Decorated(Decoration::Fault(stuck), Box::new(null(1 << 30)))
    );
}

#[test]
fn members_of_a_stripe_may_be_anything() {
    let mem = Spec::Mem(MemSpec::new(1 << 30));
    let two = |chunk| Spec::Stripe { chunk, members: vec![mem.clone(), mem.clone()] };
    assert_eq!(parse("stripe:mem:1g,mem:1g"), two(DEFAULT_CHUNK));
    assert_eq!(parse("stripe:64k:mem:1g,[mem:1g]"), two(65536));
    let mixed = "stripe:[delay:1ms,2ms:mem:1g],log:-:mem:1g,[stripe:4k:null:1g,null:1g],nbd://[::1]/a";
    let Spec::Stripe { members, .. } = parse(mixed) else { panic!("not a stripe") };
    let expected = ["delay:1ms,2ms:mem:1g", "log:-:mem:1g", "stripe:4k:null:1g,null:1g", "nbd://[::1]/a"];
    assert_eq!(members, expected.map(parse));
    assert_eq!(parse(mixed).to_string(), mixed);
    // A decorator outside of all brackets applies to the whole stripe.
    let Spec::Decorated(Decoration::Delay(_), whole) = parse("delay:1ms:stripe:mem:1g,mem:1g") else {
        panic!("not delayed")
    };
    assert_eq!(*whole, two(DEFAULT_CHUNK));
}

#[test]
fn any_path_can_be_written() {
    assert_eq!(parse("file:a%3Fb%2Cc%25"), Spec::File(file("a?b,c%")));
    let path = PathBuf::from(OsString::from_vec(b"/x\xff\n?,[]:% \xc3\xa9".to_vec()));
    let spec = Spec::File(FileSpec { path, ..file("") });
    assert_eq!(spec.to_string(), "file:/x%FF%0A%3F%2C%5B%5D%3A%25 é");
    assert_eq!(parse(&spec.to_string()), spec);
}

#[test]
fn an_error_is_one_line_that_names_the_spec_and_a_remedy() {
    let errors = [
        ("", "a volume is missing: name one"),
        ("disk.img", "`disk.img` does not say what kind of volume it is: write file:disk.img"),
        ("/dev/a:b", "write file:/dev/a:b for a file"),
        ("mem", "`mem` has no colon: write KIND:..., as in mem:1g"),
        ("ram:1g", "`ram` in `ram:1g` is not a kind of volume: use mem, null"),
        ("mem:", "`mem:` has no size"),
        ("mem:0", "`0` is not a value for size in `mem:0`"),
        ("mem:1x", "in `mem:1x`: `1x` is not a size"),
        ("mem:1g,size=2g", "options follow a question mark, as in mem:1g?block_size=4096"),
        ("file:a?size=1g,direct=on", "options are joined by `&`, as in ?size=1g&direct=on"),
        ("mem:99e", "`99e` is too large"),
        ("file:", "`file:` has no path: write file:PATH"),
        ("file:?size=1g", "has no path"),
        (
            "file:a?sise=1g",
            "`sise` in `file:a?sise=1g` is not an option of a file: it has size, mode, direct",
        ),
        ("file:a?direct=yes", "`yes` is not a value for direct in `file:a?direct=yes`: write on or off"),
        ("file:a?direct", "`direct` in `file:a?direct` has no `=`: write KEY=VALUE"),
        ("fault:mem:1m", "`mem` in `fault:mem:1m` has no `=`: write KEY=VALUE"),
        ("file:a?size=1g&size=2g", "`size` in `file:a?size=1g&size=2g` is given twice"),
        ("file:50%", "write %25 for a per cent sign"),
        ("file:a\nb", "`file:a\\nb` contains a control character: in a path write it with a per cent sign"),
        ("file:a%00", "write %25 for a per cent sign"),
        ("block:/dev/sda?size=1g", "not an option of a block device"),
        ("vhost-user:/run/a.sock?direct=on", "not an option of a vhost-user device"),
        ("vhost-user:", "has no path: write vhost-user:PATH"),
        (
            "mem:1g?block_size=1000",
            "`1000` is not a value for block_size in `mem:1g?block_size=1000`: write a power",
        ),
        ("mem:1g?block_size=256", "write a power of two from 512 to 64k"),
        ("null:1g?block_size=128k", "write a power of two from 512 to 64k"),
        ("mem:1g?block_size=4k&physical_block_size=512", "a physical block at least as large as block_size"),
        ("mem:1g?physical_block_size=512&block_size=4k", "a physical block at least as large as block_size"),
        ("null:1g?populate=off", "`populate` in `null:1g?populate=off` is not an option of a null volume"),
        ("nbd://h/x?block_size=5", "`5` is not a value for block_size in `nbd://h/x?block_size=5`"),
        ("nbd://h/x?block_size=4k&block_size=4k", "`block_size` in"),
        ("slice:mem:1g", "in `slice:mem:1g`: `mem` is not a size"),
        ("slice:1m,0:mem:1g", "`0` is not a value for size"),
        ("slice:1m,:mem:1g", "has no size"),
        ("slice:1m", "`slice:1m` has no volume: write slice:OFFSET[,LEN]:VOLUME"),
        ("stripe:", "`stripe:` has no member: write stripe:VOLUME,VOLUME"),
        ("stripe:64k", "`stripe:64k` has no member"),
        ("stripe:64k:", "has no member"),
        ("stripe:0:mem:1g", "`0` is not a value for the chunk"),
        ("stripe:6y:mem:1g", "`6y` is not a size"),
        ("stripe:mem:1g,", "a volume is missing"),
        ("stripe:[mem:1g", "brackets in `stripe:[mem:1g` are unbalanced"),
        ("stripe:mem:1g]", "brackets"),
        ("[mem:1g]x", "brackets in `[mem:1g]x`"),
        ("stripe:delay:1ms,2ms:mem:1g", "put a stripe's member that contains a comma in brackets"),
        ("delay:5:mem:1g", "in `delay:5:mem:1g`: `5` is not a duration"),
        ("delay:mem:1g", "in `delay:mem:1g`: `mem` is not a duration"),
        ("delay::mem:1g", "`delay::mem:1g` has no setting: write delay:READ[,WRITE]:VOLUME"),
        ("delay:5ms", "`delay:5ms` has no volume: write delay:READ"),
        ("fault:oops=1:mem:1g", "`oops` in `fault:oops=1:mem:1g` is not an option of a fault: it has op,"),
        ("fault:op=read+wriet:mem:1g", "`wriet` is not a value for op"),
        ("fault:every=0:mem:1g", "whole number of at least 1"),
        ("fault:probability=1.5:mem:1g", "write 0 to 1"),
        ("fault:every=2,probability=0.5:mem:1g", "`probability` in"),
        ("fault:error=eio:mem:1g", "`eio` is not a value for error"),
        ("rate:speed=1:mem:1g", "not an option of a rate"),
        ("rate:iops=-1:mem:1g", "`-1` is not a value for iops"),
        ("rate:bw=0:mem:1g", "`0` is not a value for bw"),
        ("rate:iops=1,burst=0:mem:1g", "`0` is not a value for burst"),
        ("log:x", "`log:x` has no volume: write log:PATH:VOLUME"),
    ];
    assert_errors(&errors);
    let deep = "log:-:".repeat(100_000) + "mem:1g";
    assert!(deep.parse::<Spec>().unwrap_err().to_string().starts_with("volumes are nested more than 32"));
    let unbalanced = "[".repeat(100_000).parse::<Spec>().unwrap_err().to_string();
    assert!(unbalanced.starts_with("brackets in `[[[["));
}

/// Checks that each text is refused with a message that contains these words.
fn assert_errors(errors: &[(&str, &str)]) {
    for (text, words) in errors {
        let message = text.parse::<Spec>().expect_err(text).to_string();
        assert!(message.contains(words), "{text}: {message}");
        assert!(!message.contains('\n') && message.len() < 300, "{text}: {message}");
    }
}

#[test]
fn an_error_about_an_image_of_ceph_shows_how_to_name_one() {
    assert_errors(&[
        ("rbd:disk", "`rbd:disk` has no pool and image: write rbd:POOL/IMAGE"),
        ("rbd:a/b/c/d", "has no pool and image"),
        ("rbd:pool/", "has no pool and image"),
        ("rbd:pool/disk@", "has no pool and image"),
        ("rbd:pool/disk:id=admin", "options follow a question mark, as in rbd:pool/image?id=admin"),
        ("rbd:pool/disk?id=", "write a user, as in id=admin"),
        ("rbd:pool/disk?user=admin", "`user` in `rbd:pool/disk?user=admin` is not an option of an RBD image"),
        ("rbd:pool/disk?timeout=0s", "write 1s to 1h"),
        ("rbd:pool/disk?exclusive=yes", "write on, off, take, standby or group"),
        ("rbd:pool/disk@then?exclusive=on", "an image that is only read has no owner"),
        ("rbd:pool/disk?exclusive=take&readonly=on", "an image that is only read has no owner"),
        ("rbd:pool/%ff", "write UTF-8"),
    ]);
}

fn path() -> impl Strategy<Value = PathBuf> {
    let bytes = prop_oneof![prop::sample::select(b"-/?,%[]:&=a ".to_vec()), 1u8..];
    prop::collection::vec(bytes, 1..12).prop_map(|bytes| PathBuf::from(OsString::from_vec(bytes)))
}

fn delays() -> impl Strategy<Value = crate::Delays> {
    (any::<u64>(), any::<u64>(), any::<bool>()).prop_map(|(read, write, same)| {
        let read = Duration::from_nanos(read);
        let write = if same { read } else { Duration::from_nanos(write) };
        crate::Delays { read, write, flush: write }
    })
}

fn fault() -> impl Strategy<Value = Fault> {
    let ops = prop::sample::subsequence(OpKind::ALL.to_vec(), 1..=7)
        .prop_map(|kinds| kinds.into_iter().fold(OpSet::NONE, OpSet::with));
    let when =
        prop_oneof![(1u64..).prop_map(FaultWhen::Every), (0u32..=1_000_000).prop_map(FaultWhen::PerMillion),];
    let effect = prop::sample::select(write::EFFECTS.map(|(_, effect)| effect).to_vec());
    (ops, any::<u64>(), any::<Option<u64>>(), when, effect, any::<u64>())
        .prop_map(|(ops, offset, size, when, effect, seed)| Fault { ops, offset, size, when, effect, seed })
}

fn limits() -> impl Strategy<Value = Limits> {
    let limit = || {
        let rates = any::<(Option<NonZeroU64>, Option<NonZeroU64>)>();
        rates.prop_map(|(iops, bytes_per_s)| Limit { iops, bytes_per_s })
    };
    let some = |limits: &Limits| *limits != Limits::default();
    (limit(), limit(), limit(), 1..=3_600_000u64)
        .prop_map(|(total, read, write, ms)| Limits { total, read, write, burst: Duration::from_millis(ms) })
        .prop_filter("a rate says something", some)
}

fn blocks() -> impl Strategy<Value = BlockSizes> {
    let size = || prop::option::of((9u32..=16).prop_map(|shift| 1 << shift));
    (size(), size()).prop_map(|(logical, physical)| BlockSizes {
        logical,
        physical: physical.map(|physical| physical.max(logical.unwrap_or(0))),
    })
}

fn sizes_and_modes() -> impl Strategy<Value = (Option<u64>, Option<u32>)> {
    (prop::option::of(1u64..), prop::option::of(0u32..=0o777))
}

fn rbd() -> impl Strategy<Value = RbdSpec> {
    let name = || "[a-z@/&?:%,\\[\\] é.-]{1,6}";
    let names = (name(), prop::option::of(name()), name(), prop::option::of(name()));
    let access = (prop::option::of(name()), prop::option::of(path()), prop::option::of(path()));
    let timeout = prop::option::of((1u64..3600).prop_map(Duration::from_secs));
    let ownership = prop_oneof![
        Just(ImageOwnership::Shared),
        Just(ImageOwnership::Exclusive),
        Just(ImageOwnership::Take),
        Just(ImageOwnership::Standby),
        Just(ImageOwnership::Group)
    ];
    let options = (any::<bool>(), ownership, timeout, blocks());
    (names, access, options).prop_map(
        |(
            (pool, namespace, image, snapshot),
            (id, conf, keyring),
            (read_only, ownership, timeout, blocks),
        )| {
            let is_only_read = read_only || snapshot.is_some();
            let ownership = if is_only_read { ImageOwnership::Shared } else { ownership };
            RbdSpec {
                pool,
                namespace,
                image,
                snapshot,
                id,
                conf,
                keyring,
                read_only,
                ownership,
                timeout,
                blocks,
            }
        },
    )
}

fn spec() -> impl Strategy<Value = Spec> {
    let leaf = prop_oneof![
        ((1u64..), any::<bool>(), blocks()).prop_map(|(size, populate, blocks)| Spec::Mem(MemSpec {
            size,
            populate,
            blocks
        })),
        ((1u64..), blocks()).prop_map(|(size, blocks)| Spec::Null(NullSpec { size, blocks })),
        (path(), sizes_and_modes(), any::<Option<bool>>(), any::<[bool; 2]>(), blocks()).prop_map(
            |(path, (size, mode), direct, [read_only, is_raw], blocks)| {
                Spec::File(FileSpec { path, size, mode, direct, read_only, is_raw, blocks })
            }
        ),
        (path(), any::<Option<bool>>(), any::<[bool; 2]>(), blocks()).prop_map(
            |(path, direct, [read_only, is_raw], blocks)| {
                Spec::Block(BlockSpec { path, direct, read_only, is_raw, blocks })
            }
        ),
        rbd().prop_map(Spec::Rbd),
        "(nbd|iscsi|nvme\\+tcp)://(\\[::1\\])?[a-z0-9:,/%?=.&]{0,12}"
            .prop_map(|url| Spec::Url(Url::new(&url))),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let boxed = inner.clone().prop_map(Box::new);
        let target = prop_oneof![Just(LogTarget::Stderr), path().prop_map(LogTarget::File)];
        prop_oneof![
            (prop_oneof![Just(DEFAULT_CHUNK), 1u64..], prop::collection::vec(inner, 1..4))
                .prop_map(|(chunk, members)| Spec::Stripe { chunk, members }),
            (any::<u64>(), prop::option::of(1u64..), boxed.clone())
                .prop_map(|(offset, len, volume)| Spec::Slice(SliceSpec { offset, len }, volume)),
            (delays(), boxed.clone())
                .prop_map(|(delays, volume)| Spec::Decorated(Decoration::Delay(delays), volume)),
            (fault(), boxed.clone())
                .prop_map(|(fault, volume)| Spec::Decorated(Decoration::Fault(fault), volume)),
            (limits(), boxed.clone())
                .prop_map(|(limits, volume)| Spec::Decorated(Decoration::Rate(limits), volume)),
            (target, boxed).prop_map(|(target, volume)| Spec::Decorated(Decoration::Log(target), volume)),
        ]
    })
}

proptest! {
    #[test]
    fn every_spec_is_parsed_back_from_its_text(spec in spec()) {
        prop_assert_eq!(spec.to_string().parse::<Spec>(), Ok(spec));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "(mem|file|slice|stripe|delay|fault|rate|log|[:,=?%\\[\\]]|[0-9]k?|\\PC){0,12}") {
        if let Err(error) = text.parse::<Spec>() {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn ram_is_counted_at_any_depth() {
    let bytes = |text: &str| parse(text).ram_bytes();
    assert_eq!(bytes("stripe:64k:mem:1g,[delay:1ms:mem:1g],null:1g"), 2 << 30);
    assert_eq!(bytes("log:-:null:1g"), 0);
    assert_eq!(bytes("slice:1m,1m:mem:1g"), 1 << 30);
}

#[test]
fn relative_paths_are_resolved_against_a_directory() {
    let below = |text: &str| parse(text).below(std::path::Path::new("/etc/b")).to_string();
    for (text, expected) in [
        ("file:a.img?size=1g", "file:/etc/b/a.img?size=1g"),
        ("block:/dev/sdb", "block:/dev/sdb"),
        ("vhost-user:a.sock?readonly=on", "vhost-user:/etc/b/a.sock?readonly=on"),
        (
            "log:x.log:stripe:file:a,[delay:1ms:file:/b]",
            "log:/etc/b/x.log:stripe:file:/etc/b/a,[delay:1ms:file:/b]",
        ),
        ("rbd:p/i?conf=c.conf&keyring=/k", "rbd:p/i?conf=/etc/b/c.conf&keyring=/k"),
        ("rbd:p/i", "rbd:p/i"),
        ("log:-:mem:1g", "log:-:mem:1g"),
        ("slice:1m:file:a.img", "slice:1m:file:/etc/b/a.img"),
        ("nbd+unix:///x?socket=s", "nbd+unix:///x?socket=/etc/b/s"),
    ] {
        assert_eq!(below(text), parse(expected).to_string(), "{text}");
    }
}

#[test]
fn a_resized_volume_has_the_spec_of_its_new_size() {
    let resized = |text: &str| {
        let spec = parse(text);
        (spec.size(), spec.with_size(4096).map(|spec| spec.to_string()).unwrap_or_default())
    };
    assert_eq!(resized("mem:1m?block_size=4k"), (Some(1 << 20), "mem:4k?block_size=4k".to_owned()));
    assert_eq!(resized("file:a"), (None, "file:a?size=4k".to_owned()));
    assert_eq!(
        resized("delay:1ms:slice:8k,1m:block:/dev/sdb"),
        (Some(1 << 20), "delay:1ms:slice:8k,4k:block:/dev/sdb".to_owned())
    );
    assert_eq!(resized("slice:4k:mem:1m"), (Some((1 << 20) - 4096), "slice:4k:mem:8k".to_owned()));
    assert_eq!(resized("slice:2m:mem:1m").0, None);
    for fixed in ["null:1m", "rbd:p/i", "block:/dev/sdb", "stripe:mem:1m,mem:1m", "log:-:nbd://h/x"] {
        assert_eq!(resized(fixed), (None, String::new()));
    }
}

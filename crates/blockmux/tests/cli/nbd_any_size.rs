//! NBD clients that did not ask for block sizes: requests of any alignment and of up to 64 MiB, and
//! files of any length.

use crate::daemon::Daemon;
use crate::program::{has, succeed};
use crate::raw_client::{FUA, RawClient, TRIM, WRITE, WRITE_ZEROES};
use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

/// Bytes that differ between neighbours and between blocks.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

#[test]
fn requests_of_any_range_act_on_exactly_their_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    for volume in [
        "mem:16m?block_size=4096".to_owned(),
        format!("file:{}?size=16m&block_size=4096", file.display()),
        format!("file:{}?direct=off", file.display()),
    ] {
        let daemon = Daemon::serve(&[&volume]);
        let mut client = RawClient::connect(&daemon.socket());
        let mut content = pattern(40_000);
        assert_eq!(client.write(0, 0, &content), 0);
        for (offset, len) in [(1, 1), (4095, 2), (8192, 100), (12_000, 288), (16_001, 17_000)] {
            let data = vec![0xa5; len];
            assert_eq!(client.write(FUA, offset, &data), 0, "{volume}: {len} bytes at {offset}");
            content[offset as usize..offset as usize + len].copy_from_slice(&data);
        }
        for (offset, len) in [(5, 6), (20_479, 2), (24_570, 9000)] {
            assert_eq!(client.simple(WRITE_ZEROES, 0, offset, len as u32), 0, "{volume}: {offset}");
            content[offset as usize..offset as usize + len].fill(0);
        }
        assert_eq!(client.simple(TRIM, 0, 1, 400), 0, "{volume}: no whole block is in it");
        for (offset, len) in [(0, 40_000), (3, 39_000), (4095, 2), (39_999, 1)] {
            assert!(client.read(offset, len) == content[offset as usize..offset as usize + len], "{volume}");
        }
    }
}

/// Each client writes its own bytes of the same blocks; a client that wrote back what it had read
/// before another one's write would undo it.
#[test]
fn clients_that_write_parts_of_the_same_blocks_undo_nothing_of_each_other() {
    let daemon = Daemon::serve(&["mem:1m?block_size=4096", "--cores", "2"]);
    std::thread::scope(|scope| {
        for nth in 0..4_u64 {
            let socket = daemon.socket();
            scope.spawn(move || {
                let mut client = RawClient::connect(&socket);
                for round in 0..200_u64 {
                    let value = (nth << 32 | round).to_be_bytes();
                    // One write is within a block, the other one across two.
                    for offset in [100 + 8 * nth, 4080 + 8 * nth] {
                        assert_eq!(client.write(0, offset, &value), 0);
                        assert_eq!(client.read(offset, 8), value, "client {nth} in round {round}");
                    }
                }
            });
        }
    });
}

#[test]
fn a_write_that_waits_for_one_of_its_blocks_continues_when_that_is_unlocked() {
    let daemon = Daemon::serve(&["delay:100ms:mem:1m"]);
    let connect = || {
        let socket = UnixStream::connect(daemon.socket()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        RawClient::over(socket)
    };
    let (mut first, mut second) = (connect(), connect());
    let write = |client: &mut RawClient, offset: u64, data: &[u8]| {
        client.request(WRITE, 0, offset, data.len() as u32);
        client.send(data);
    };
    // It locks block 5 until it has read and written that.
    write(&mut first, 5 * 512 + 10, &[1; 10]);
    // It will lock blocks 3 to 7, and reads block 3 first.
    write(&mut second, 3 * 512 + 10, &[2; 4 * 512]);
    assert_eq!((first.reply(), second.reply()), (0, 0));
}

#[test]
fn requests_of_50_mib_are_split() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    for (volume, offset) in [
        ("mem:64m".to_owned(), 0),
        (format!("file:{}?size=64m", file.display()), 4711),
        (format!("file:{}?direct=off", file.display()), 1 << 20),
    ] {
        let daemon = Daemon::serve(&[&volume]);
        let mut client = RawClient::connect(&daemon.socket());
        let data = pattern(49_900_000);
        assert_eq!(client.write(FUA, offset, &data), 0, "{volume}");
        assert!(client.read(offset, data.len()) == data, "{volume}");
        client.request(WRITE, 0, 0, (64 << 20) + 1);
        assert!(client.is_closed(), "{volume}: more than 64 MiB are too much");
    }
}

#[test]
fn a_file_keeps_its_length_and_its_last_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    fs::write(&file, pattern(10_001)).unwrap();
    let daemon = Daemon::serve(&[&format!("file:{}", file.display())]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.read(9_000, 1_240), [&pattern(10_001)[9_000..], &[0; 239]].concat());
    assert_eq!(client.write(FUA, 9_990, b"last bytes!"), 0);
    assert_eq!(client.simple(WRITE_ZEROES, FUA, 10_000, 1), 0);
    let mut content = pattern(10_001);
    content[9_990..].copy_from_slice(b"last bytes\0");
    assert!(fs::read(&file).unwrap() == content);
    let copy = directory.path().join("copy.img");
    if has("nbdcopy") {
        succeed(Command::new("nbdcopy").arg(daemon.url()).arg(&copy));
        assert!(fs::read(&copy).unwrap()[..10_001] == content);
    }
    if has("qemu-img") {
        let formats = ["convert", "-f", "raw", "-O", "raw"];
        succeed(Command::new("qemu-img").args(formats).arg(daemon.url()).arg(&copy));
        assert!(fs::read(&copy).unwrap()[..10_001] == content);
    }
    // What a block device's client writes there is kept, too.
    assert_eq!(client.write(0, 10_239, &[7]), 0);
    assert_eq!(fs::read(&file).unwrap(), [&content[..], &[0; 238], &[7]].concat());
}

#[test]
fn nbdsh_that_does_not_request_block_sizes_uses_any_range() {
    if !has("nbdsh") {
        return;
    }
    let daemon = Daemon::serve(&["mem:64m?block_size=4096"]);
    let script = r#"
h.set_request_block_size(False)
h.add_meta_context("base:allocation")
h.connect_uri(uri)
assert h.get_block_size(nbd.SIZE_MINIMUM) == 1
h.pwrite(b"x" * 1000, 3500, nbd.CMD_FLAG_FUA)
assert h.pread(1002, 3499) == b"\0" + b"x" * 1000 + b"\0"
h.zero(10, 4090)
assert h.pread(12, 4089) == b"x" + bytes(10) + b"x"
h.trim(100, 1)
h.cache(100, 1)
extents = []
h.block_status(8193, 1, lambda context, offset, entries, error: extents.extend(entries))
assert sum(extents[::2]) == 8193, extents
try:
    h.zero(10, 4090, nbd.CMD_FLAG_FAST_ZERO)
    raise AssertionError("it cannot be fast")
except nbd.Error as error:
    assert error.errno == "ENOTSUP" or error.errno == "EOPNOTSUPP", error
data = bytes(range(256)) * (50 << 12)
h.pwrite(data, 4711)
assert h.pread(len(data), 4711) == data
parts = []
h.pread_structured(len(data), 4711, lambda part, offset, *_: parts.append((offset, len(part))))
assert len(parts) > 1 and sum(part[1] for part in parts) == len(data), parts
"#;
    let script = format!("uri = '{}'\n{script}", daemon.url());
    let mut nbdsh = Command::new("nbdsh");
    // The nbd module is installed for the system's Python, which may not be the first in PATH.
    nbdsh.env("PATH", "/usr/bin:/bin");
    succeed(nbdsh.args(["-c", &script]));
}

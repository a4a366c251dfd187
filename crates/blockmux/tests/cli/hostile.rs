//! Peers and surroundings that mean harm: what they can cost, and how long they can keep us.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use crate::raw_client::{RawClient, WRITE};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, prlimit};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Output;
use tempfile::TempDir;

#[test]
fn a_write_whose_data_does_not_come_costs_no_memory_but_the_promise() {
    let daemon = Daemon::serve(&["mem:64m", "--cores", "1"]);
    let before = daemon.resident();
    let mut clients: Vec<_> = (0..16).map(|_| RawClient::connect(&daemon.socket())).collect();
    for client in &mut clients {
        client.request(WRITE, 0, 0, 32 << 20);
        client.send(&[7; 1000]);
    }
    // One that comes later is served, so they all have been seen.
    assert_eq!(RawClient::connect(&daemon.socket()).write(0, 0, &[1; 512]), 0);
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for 16 kB");
}

#[test]
fn a_lack_of_file_descriptors_is_said_once_while_it_lasts() {
    let mut daemon = Daemon::serve(&["delay:500ms:mem:1m", "--cores", "1"]);
    let mut first = RawClient::connect(&daemon.socket());
    let limit = getrlimit(Resource::Nofile);
    prlimit(Some(daemon.pid()), Resource::Nofile, Rlimit { current: Some(64), ..limit }).unwrap();
    let crowd: Vec<_> = (0..100).map(|_| UnixStream::connect(daemon.socket()).unwrap()).collect();
    daemon.wait_for_line("cannot accept for now: Too many open files");
    // It takes as long as several attempts to accept.
    assert_eq!(first.write(0, 0, &[1; 512]), 0);
    drop(crowd);
    assert_eq!(RawClient::connect(&daemon.socket()).read(0, 512), [1; 512]);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let mut rest = String::new();
    daemon.stderr.read_to_string(&mut rest).unwrap();
    // It may come back while the crowd leaves, but is not said at each of the attempts, twenty a second.
    assert!(rest.matches("cannot accept").count() <= 3, "{rest}");
}

#[test]
fn a_config_file_without_end_is_not_read_to_it() {
    let output = blockmux(["serve", "--config", "/dev/zero"]);
    let expected = "blockmux: cannot read config file /dev/zero: has more than 4 MiB; check --config\n";
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), expected));
}

#[test]
fn a_file_is_not_copied_onto_itself_by_another_name() {
    let directory = tempfile::tempdir().unwrap();
    let (file, link) = (directory.path().join("disk"), directory.path().join("link"));
    std::fs::write(&file, [7; 4096]).unwrap();
    std::fs::hard_link(&file, &link).unwrap();
    let [file, link] = [file, link].map(|path| format!("file:{}", path.display()));
    let output = blockmux(["copy", &file, &link]);
    let expected = format!("blockmux: {file}: source and destination are the same\n");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(2), expected));
}

#[test]
fn a_server_that_breaks_every_session_is_given_up_and_the_reason_is_said() {
    // A reply to nothing that was asked.
    let server =
        Server::start(1 << 20, |socket, _| socket.write_all(b"\x67\x44\x66\x98\0\0\0\0wrong in").is_ok());
    let output = server.copied();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("volume is out of reach: peer "), "{}", text(&output.stderr));
}

#[test]
fn a_server_that_hangs_up_at_every_request_is_given_up() {
    let output = Server::start(1 << 20, |_, _| false).copied();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("volume is out of reach: "), "{}", text(&output.stderr));
}

#[test]
fn sizes_that_no_volume_has_are_named_and_not_copied() {
    for size in [0, 1 << 63, u64::MAX] {
        let server = Server::start(size, |_, _| false);
        let output = server.copied();
        assert_eq!(output.status.code(), Some(2));
        let expected = format!("has {size} bytes; copy a volume of 1 to 9223372036854775296 bytes\n");
        assert!(text(&output.stderr).ends_with(&expected), "{}", text(&output.stderr));
    }
}

#[test]
fn a_server_that_lists_and_then_says_nothing_is_not_asked_for_every_export() {
    let server = Server::silent_after_a_list_of(40);
    let output = blockmux(["discover", &server.url]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout).lines().filter(|line| line.ends_with("size unknown")).count(), 40);
    assert!(text(&output.stderr).contains("24 exports were not asked for"), "{}", text(&output.stderr));
}

/// A server of one export, which does to a request what the test says.
struct Server {
    url: String,
    directory: TempDir,
}

impl Server {
    /// Each request's head goes to `on_request`, which answers whether the connection stays.
    fn start(size: u64, on_request: fn(&mut UnixStream, &[u8; 28]) -> bool) -> Server {
        Server::listen(move |mut socket| {
            let info = [&[0, 0][..], &size.to_be_bytes(), &[0, 1]].concat();
            let is_told = converse(&mut socket, |option| match option {
                6 | 7 => Some(vec![(3, info.clone()), (1, vec![])]),
                _ => Some(vec![(1 << 31 | 1, vec![])]),
            });
            let mut head = [0; 28];
            while is_told && socket.read_exact(&mut head).is_ok() && on_request(&mut socket, &head) {}
        })
    }

    fn silent_after_a_list_of(exports: u32) -> Server {
        Server::listen(move |mut socket| {
            converse(&mut socket, |option| match option {
                3 => {
                    let names = (0..exports)
                        .map(|nth| (2, [&[0, 0, 0, 2][..], format!("{nth:02}").as_bytes()].concat()));
                    Some(names.chain([(1, vec![])]).collect())
                }
                _ => None,
            });
        })
    }

    fn listen(serve: impl Fn(UnixStream) + Clone + Send + 'static) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket: PathBuf = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let serve = serve.clone();
                std::thread::spawn(move || serve(socket.unwrap()));
            }
        });
        let url = format!("nbd+unix:///?socket={}&reconnect=200ms", socket.display());
        Server { url, directory }
    }

    /// What comes of copying it to a new file.
    fn copied(&self) -> Output {
        let file = format!("file:{}", self.directory.path().join("copy").display());
        std::process::Command::new(BLOCKMUX).args(["copy", &self.url, &file]).output().unwrap()
    }
}

/// The handshake: `answer` gives the replies to an option, or `None` for silence. Ends with the answer to
/// `NBD_OPT_GO`, and tells whether it came to that.
fn converse(socket: &mut UnixStream, answer: impl Fn(u8) -> Option<Vec<(u32, Vec<u8>)>>) -> bool {
    if socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").is_err() || socket.read_exact(&mut [0; 4]).is_err() {
        return false;
    }
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        let (option, len) = (&head[8..12], u32::from_be_bytes(head[12..].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).unwrap();
        for (rep, data) in answer(option[3]).into_iter().flatten() {
            let (rep, len) = (rep.to_be_bytes(), (data.len() as u32).to_be_bytes());
            // It may have heard enough.
            let _ =
                socket.write_all(&[b"\0\x03\xe8\x89\x04\x55\x65\xa9", option, &rep, &len, &data].concat());
        }
        if option[3] == 7 {
            return true;
        }
    }
    false
}

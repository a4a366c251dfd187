//! A core's buffers are shared fairly: no client, and no number of clients, can starve others.

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::nbd::target;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::MemVolume;
use blockmux_wire::nbd::transmission::{Cmd, NBD_REQUEST_MAGIC, NBD_SIMPLE_REPLY_MAGIC};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// A target on one core with [`POOL`] bytes of buffers.
struct Target {
    folder: TempDir,
    _cores: Cores,
}

impl Target {
    fn start(policy: PollPolicy) -> Target {
        let folder = tempfile::tempdir().unwrap();
        let volume = Arc::new(MemVolume::new(SIZE));
        let export =
            Export { name: "disk0".to_owned(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let config = CoresConfig { policy, pool_limit_bytes: POOL, ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        let listener = Listener::bind(&Address::Unix(folder.path().join("socket"))).unwrap();
        let inboxes = cores.inboxes();
        let limit = ConnectionLimit::new(1000);
        cores
            .ask(0, |core| ListenerTask::spawn(core, listener, inboxes, target::serve(exports, None), limit))
            .unwrap();
        Target { folder, _cores: cores }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Clients that have each sent half of a long write. Together they request many times the
    /// buffers of the target.
    fn half_writes(&self) -> Vec<Client> {
        [8 << 20, 4 << 20, 2 << 20, 1 << 20, 512 << 10]
            .iter()
            .flat_map(|&len| std::iter::repeat_n(len, 10))
            .map(|len| {
                let mut client = Client::connect(&self.socket());
                client.request(Cmd::NBD_CMD_WRITE, len);
                // Sending the rest would block.
                client.socket.write_all(&[0xee; 100_000]).unwrap();
                client
            })
            .collect()
    }
}

/// A client in the transmission phase with simple replies.
struct Client {
    socket: UnixStream,
}

impl Client {
    fn connect(path: &Path) -> Client {
        let mut socket = UnixStream::connect(path).unwrap();
        // The timeout is long, so that it only expires if the target hangs.
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.read_exact(&mut [0; 18]).unwrap();
        // Both client flags, and NBD_OPT_EXPORT_NAME with an empty name.
        socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        socket.read_exact(&mut [0; 10]).unwrap();
        Client { socket }
    }

    fn request(&mut self, command: Cmd, len: u32) {
        let magic = NBD_REQUEST_MAGIC.to_be_bytes();
        let head = [&magic[..], &[0; 2], &command.0.to_be_bytes(), &[0; 16], &len.to_be_bytes()].concat();
        self.socket.write_all(&head).unwrap();
    }

    fn expect_success(&mut self) {
        let mut reply = [0xff; 16];
        self.socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], (u64::from(NBD_SIMPLE_REPLY_MAGIC) << 32).to_be_bytes());
    }

    fn write(&mut self, data: &[u8]) {
        self.request(Cmd::NBD_CMD_WRITE, data.len() as u32);
        self.socket.write_all(data).unwrap();
        self.expect_success();
    }

    fn read(&mut self, len: u32) -> Vec<u8> {
        self.request(Cmd::NBD_CMD_READ, len);
        self.expect_success();
        let mut data = vec![0; len as usize];
        self.socket.read_exact(&mut data).unwrap();
        data
    }
}

#[test]
fn other_clients_connect_read_and_write_while_long_writes_hold_buffers() {
    for policy in POLICIES {
        let target = Target::start(policy);
        let unfinished = target.half_writes();
        for fill in 1..4 {
            let mut client = Client::connect(&target.socket());
            client.write(&[fill; 4096]);
            client.write(&[fill; 204_800]);
            assert_eq!(client.read(204_800), [fill; 204_800]);
        }
        drop(unfinished);
    }
}

#[test]
fn clients_that_disconnect_in_a_long_write_release_its_buffers() {
    for policy in POLICIES {
        let target = Target::start(policy);
        for _ in 0..3 {
            drop(target.half_writes());
        }
        let mut client = Client::connect(&target.socket());
        client.write(&vec![7; 8 << 20]);
        assert!(client.read(8 << 20) == vec![7; 8 << 20]);
    }
}

#[test]
fn concurrent_long_writes_complete_even_if_their_buffers_exceed_the_pool() {
    for policy in POLICIES {
        let target = Target::start(policy);
        let clients = (0..20).map(|_| {
            let mut client = Client::connect(&target.socket());
            std::thread::spawn(move || (0..3).for_each(|_| client.write(&vec![9; 8 << 20])))
        });
        clients.collect::<Vec<_>>().into_iter().for_each(|client| client.join().unwrap());
    }
}

const POLICIES: [PollPolicy; 2] = [PollPolicy::ADAPTIVE, PollPolicy::Never];
const SIZE: u64 = 8 << 20;
const POOL: usize = 64 << 20;

//! A forwarder between a client and a daemon that cuts connections on the way.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of bytes after which a connection is cut, for each direction; `None` for no cut.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cut {
    pub(crate) to_server: Option<usize>,
    pub(crate) to_client: Option<usize>,
}

/// A proxy. Its threads end with the test's process.
pub(crate) struct Proxy {
    cuts_made: Arc<AtomicUsize>,
}

impl Proxy {
    /// Forwards to `server`. The first connections are cut after the numbers of bytes in `cuts`.
    pub(crate) fn start(listener: UnixListener, server: PathBuf, cuts: Vec<Cut>) -> Proxy {
        let cuts_made = Arc::new(AtomicUsize::new(0));
        let counter = cuts_made.clone();
        thread::spawn(move || {
            let mut cuts = cuts.into_iter();
            for client in listener.incoming() {
                let cut = cuts.next().unwrap_or_default();
                forward(client.unwrap(), &server, cut, &counter);
            }
        });
        Proxy { cuts_made }
    }

    /// Number of connections that were cut.
    pub(crate) fn cuts_made(&self) -> usize {
        self.cuts_made.load(Ordering::SeqCst)
    }
}

fn forward(client: UnixStream, server: &Path, cut: Cut, cuts_made: &Arc<AtomicUsize>) {
    let Ok(server) = UnixStream::connect(server) else { return };
    let ways = [
        (client.try_clone().unwrap(), server.try_clone().unwrap(), cut.to_server),
        (server, client, cut.to_client),
    ];
    for (from, to, limit) in ways {
        let cuts_made = cuts_made.clone();
        thread::spawn(move || {
            if pump(&from, &to, limit) {
                cuts_made.fetch_add(1, Ordering::SeqCst);
            }
            // Both directions end together, as in a network failure.
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

/// Forwards until the sender closes or `limit` is reached; returns whether it was the limit.
fn pump(mut from: &UnixStream, mut to: &UnixStream, limit: Option<usize>) -> bool {
    let mut left = limit.unwrap_or(usize::MAX);
    let mut buffer = vec![0; 64 << 10];
    while left > 0 {
        let most = left.min(buffer.len());
        let Ok(received @ 1..) = from.read(&mut buffer[..most]) else { return false };
        if to.write_all(&buffer[..received]).is_err() {
            return false;
        }
        left -= received;
    }
    true
}

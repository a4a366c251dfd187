//! A hostile client against the NBD target, with volumes that fail when the input requests it.

use crate::choices::Choices;
use crate::nbd_server_stream::ServerStream;
use crate::target_side::{ProtocolChecks, Sent, TargetRun};
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::nbd::server::{NbdTargetSession, NbdTls, TlsMode};
use blockmux_volume::{MemVolume, NullVolume, Pool, Volume};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Reads `data` as choices and a client's stream.
pub(crate) fn nbd_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
    let now = Instant::now();
    // Chosen by the length, so that existing inputs keep their meaning.
    let mode = [TlsMode::Off, TlsMode::Off, TlsMode::Optional, TlsMode::Required][data.len() % 4];
    let session = NbdTargetSession::new(exports.clone(), pool.clone(), now);
    let session = session.with_tls(NbdTls { mode, subjects: None });
    TargetRun::new((choices, stream), (session, exports), ServerStream::default(), pool, now).drive();
}

impl ProtocolChecks for ServerStream {
    /// Shorter than the deadline of the handshake.
    const NEAR: Duration = Duration::from_secs(20);
    const MAX_OUTBOX: usize = (64 << 20) + (32 << 20) + (2 << 20);
    const MAX_POOLED: usize = 128 << 20;

    /// Number of bytes to send: a socket may be full after any byte.
    fn room(choice: u8) -> usize {
        match choice {
            0..=127 => usize::MAX,
            choice => usize::from(choice - 128) << 5,
        }
    }

    fn on_sent(&mut self, sent: &Sent<'_>) {
        self.follow(sent);
    }

    fn on_quiet(&self) {
        self.check_end();
    }
}

fn exports() -> Exports {
    let export = |name: &str, description: &str, read_only, volume: Arc<dyn Volume>| Export {
        name: name.into(),
        description: description.into(),
        read_only,
        volume,
    };
    Exports::new(vec![
        export("disk0", "a RAM disk", false, Arc::new(MemVolume::new(SIZE))),
        export("frozen", "", true, Arc::new(MemVolume::new(SIZE))),
        export("huge", "nothing of it is kept", false, HUGE.clone()),
    ])
}

/// Created once, because it allocates many zeroes.
static HUGE: LazyLock<Arc<NullVolume>> = LazyLock::new(|| Arc::new(NullVolume::new(1 << 50)));

/// Size of each RAM volume in bytes, enough for long payload.
const SIZE: u64 = 192 << 10;

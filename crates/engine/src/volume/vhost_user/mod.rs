//! Block devices of vhost-user back ends as volumes: exports of QEMU's storage daemon, of SPDK, and
//! of `blockmux attach --socket`.
//!
//! ```text
//!   channels of a core ──▶ CoreQueue, one virtqueue ═══ shared memory ═══ back end
//!                               ▲ installs, removes
//!   thread of the volume ──▶ BackEnd ════════════ Unix socket ═══════════ back end
//! ```
//! A back end serves one front end, so a volume has one connection. Each core that uses the volume
//! has a virtqueue of its own, which its channels share. When the connection is lost, the thread
//! connects again, with new memory that the old back end does not have, and requests that have not
//! completed are sent again. If the back end does not come back in time, they fail.

mod back_end;
mod channel;
mod core_queue;
mod outage;
mod state;
mod volume;

pub use back_end::BackEndError;
pub use state::VhostUserOptions;
pub use volume::VhostUserVolume;

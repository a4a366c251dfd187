//! NBD, the Network Block Device protocol, as specified in `doc/proto.md` of the repository
//! NetworkBlockDevice/nbd, with its `EXTENDED_HEADERS` extension (branch `extension-ext-header`).
//!
//! A connection has two phases, and each has its module: [`handshake`] (options and their replies)
//! and [`transmission`] (requests and their replies). All numbers are big-endian. No structure here
//! has padding.

pub mod handshake;
pub mod transmission;

/// The port that IANA assigned to NBD.
pub const NBD_DEFAULT_PORT: u16 = 10809;

/// The longest string that the protocol allows, in bytes (proto.md, "Conventions").
pub const NBD_MAX_STRING: usize = 4096;

/// The largest minimum block size that may be advertised, in bytes (proto.md, "Size constraints").
pub const NBD_MAX_MINIMUM_BLOCK: u32 = 65_536;

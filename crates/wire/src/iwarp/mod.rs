//! iWARP: RDMA over TCP, in three layers.
//!
//! ```text
//!   ULPDU_Length │ DDP header           │ RDMAP header │ payload │ padding │ CRC
//!   2 bytes      │ 14 tagged, or 18     │ 0, 4 or 28   │         │ to 4    │ 4 bytes, not always used
//!   └─ MPA ──────┴─ DDP ────────────────┴─ RDMAP ──────┴─────────┴─ MPA ───┘
//! ```
//! [`mpa`] frames the stream (RFC 5044, RFC 6581), [`ddp`] places payload (RFC 5041), and [`rdmap`]
//! defines messages (RFC 5040). All numbers are big-endian. The RDMAP fields within DDP's headers,
//! one control byte and four bytes of an untagged header, are part of DDP's structures, with
//! RDMAP's names.

pub mod ddp;
pub mod mpa;
pub mod rdmap;

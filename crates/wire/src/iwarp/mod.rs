//! iWARP: RDMA over TCP, in three layers.
//!
//! ```text
//!   ULPDU_Length │ DDP header           │ RDMAP header │ payload │ padding │ CRC
//!   2 bytes      │ 14 tagged, or 18     │ 0, 4 or 28   │         │ to 4    │ 4 bytes, not always used
//!   └─ MPA ──────┴─ DDP ────────────────┴─ RDMAP ──────┴─────────┴─ MPA ───┘
//! ```
//! [`mpa`] cuts the stream into frames (RFC 5044, RFC 6581), [`ddp`] says where the payload of each
//! belongs (RFC 5041), and [`rdmap`] what it is for (RFC 5040). All numbers are big-endian. The one
//! byte of DDP's header that is RDMAP's, and the four behind it in an untagged one, stand in DDP's
//! structures under the names that RDMAP gives them.

pub mod ddp;
pub mod mpa;
pub mod rdmap;

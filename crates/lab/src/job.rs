//! What to measure, in fio's vocabulary: every option means what it means there.

use serde::{Deserialize, Serialize};

/// The pattern of one job, fio's `rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Rw {
    /// Sequential reads.
    #[serde(rename = "read")]
    Read,
    /// Sequential writes.
    #[serde(rename = "write")]
    Write,
    /// Random reads.
    #[serde(rename = "randread")]
    RandRead,
    /// Random writes.
    #[serde(rename = "randwrite")]
    RandWrite,
    /// Sequential reads and writes mixed.
    #[serde(rename = "readwrite")]
    ReadWrite,
    /// Random reads and writes mixed.
    #[serde(rename = "randrw")]
    RandRw,
    /// Sequential discards.
    #[serde(rename = "trim")]
    Trim,
    /// Random discards.
    #[serde(rename = "randtrim")]
    RandTrim,
}

/// How written blocks are checked when read back, fio's `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// A CRC-32C over each block, stored in its head.
    Crc32c,
    /// A pattern made from the block's own offset.
    Pattern,
}

/// One job: a pattern on one volume. All `numjobs` workers have a connection and a queue each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// fio's job name.
    pub name: String,
    /// Pattern.
    pub rw: Rw,
    /// Block size in bytes.
    pub bs: u32,
    /// I/O in flight for each worker.
    pub iodepth: u32,
    /// Workers, each with a connection.
    pub numjobs: u32,
    /// Measured time in milliseconds (fio takes seconds; fractions are allowed here).
    pub runtime_ms: u64,
    /// Time before measuring starts, in milliseconds.
    pub ramp_time_ms: u64,
    /// Bytes of the volume to work on; `None`: from `offset` to its end.
    pub size: Option<u64>,
    /// Where that range begins, in bytes.
    pub offset: u64,
    /// Per cent of reads in a mixed pattern.
    pub rwmixread: u8,
    /// Check what was written.
    pub verify: Option<Verify>,
    /// Write with FUA every so many writes, fio's `sync`-like; 0 for never.
    pub fua_every: u32,
    /// Flush after so many writes, fio's `fsync`; 0 for never.
    pub fsync_every: u32,
    /// Seed of the random offsets, fio's `randseed`.
    pub randseed: u64,
}

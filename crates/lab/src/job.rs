//! The job to measure, in fio's vocabulary: every option has fio's meaning.
//!
//! Two differences follow from measuring volumes instead of files. A job always runs for `runtime`,
//! and repeats its range as often as necessary (fio's `time_based`). Random offsets come from a
//! permutation of the range's blocks, which is equivalent to fio's random map, but needs no map.

use crate::content::Verify;
use crate::job_error::JobError;
use crate::units::{Size, short};
use serde::{Deserialize, Serialize};

/// Largest block size in bytes, which is the largest transfer of a volume.
pub const MAX_BS: u32 = 32 << 20;
/// Most I/O in flight of one worker.
pub const MAX_IODEPTH: u32 = 4096;
/// Most workers of one job.
pub const MAX_NUMJOBS: u32 = 1024;
/// Longest runtime and ramp in milliseconds: a week.
pub const MAX_TIME_MS: u64 = 7 * 86_400_000;

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

impl Rw {
    /// All patterns.
    pub const ALL: [Rw; 8] =
        [Rw::Read, Rw::Write, Rw::RandRead, Rw::RandWrite, Rw::ReadWrite, Rw::RandRw, Rw::Trim, Rw::RandTrim];

    /// fio's name of the pattern.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
            Rw::ReadWrite => "readwrite",
            Rw::RandRw => "randrw",
            Rw::Trim => "trim",
            Rw::RandTrim => "randtrim",
        }
    }

    /// Whether offsets are random.
    #[must_use]
    pub fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite | Rw::RandRw | Rw::RandTrim)
    }

    /// Whether the pattern changes the volume's content, including by discards.
    #[must_use]
    pub fn changes_content(self) -> bool {
        !matches!(self, Rw::Read | Rw::RandRead)
    }
}

/// One job: a pattern on one volume. Each of the `numjobs` workers has its own connection and
/// queue.
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
    /// Bytes of the volume to use; `None`: from `offset` to the volume's end.
    pub size: Option<Size>,
    /// Start of the used range.
    pub offset: Size,
    /// Distance between the starts of consecutive workers' ranges.
    pub offset_increment: Size,
    /// Percentage of reads in a mixed pattern.
    pub rwmixread: u8,
    /// Draw each random offset independently, so that blocks may repeat; otherwise each block
    /// occurs once in every pass.
    pub norandommap: bool,
    /// Verify written blocks.
    pub verify: Option<Verify>,
    /// Every nth write has FUA; 1 is fio's `sync`, 0: never.
    pub fua_every: u32,
    /// Flush after this many writes, fio's `fsync`; 0: never.
    pub fsync_every: u32,
    /// Seed of the random offsets, fio's `randseed`.
    pub randseed: u64,
    /// What does the job in place of the load generator: "bonnie++ on XFS". It decides itself how
    /// many requests are in flight, and for how long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

impl Default for Job {
    /// fio's defaults: sequential reads of 4 KiB, one in flight, one worker, the whole volume,
    /// mixes half and half, no verification. `runtime`, which has no default in fio, is ten
    /// seconds.
    fn default() -> Job {
        Job {
            name: "job".into(),
            rw: Rw::Read,
            bs: 4096,
            iodepth: 1,
            numjobs: 1,
            runtime_ms: 10_000,
            ramp_time_ms: 0,
            size: None,
            offset: Size::ZERO,
            offset_increment: Size::ZERO,
            rwmixread: 50,
            norandommap: false,
            verify: None,
            fua_every: 0,
            fsync_every: 0,
            randseed: 1,
            program: None,
        }
    }
}

/// The range of one worker: a whole number of blocks of `bs` bytes, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset in bytes; a multiple of the volume's block.
    pub offset: u64,
    /// Number of blocks of the job's `bs`.
    pub blocks: u64,
}

impl Job {
    /// A name that describes the job: `randread-4k-qd32`, with several workers
    /// `randread-4k-qd32-x4`.
    #[must_use]
    pub fn name_by_shape(&self) -> String {
        let workers = if self.numjobs > 1 { format!("-x{}", self.numjobs) } else { String::new() };
        format!("{}-{}-qd{}{workers}", self.rw.name(), short(self.bs.into()), self.iodepth)
    }

    /// Checks that the job can run on a volume of `volume_size` bytes in blocks of `volume_block`
    /// bytes.
    ///
    /// # Errors
    /// The first option that prevents it.
    pub fn validate(&self, volume_size: u64, volume_block: u32) -> Result<(), JobError> {
        self.check_bounds()?;
        if !self.bs.is_multiple_of(volume_block) {
            let why = format!("not a multiple of the volume's block of {volume_block} bytes");
            return Err(JobError::bad_value("bs", short(self.bs.into()), why));
        }
        self.check_verify()?;
        let block = u64::from(volume_block);
        for (key, place) in [("offset", self.offset), ("offset_increment", self.offset_increment)] {
            if matches!(place, Size::Bytes(bytes) if bytes % block != 0) {
                let why = format!("not a multiple of the volume's block of {volume_block} bytes");
                return Err(JobError::bad_value(key, place.short(), why));
            }
        }
        let first = self.range(volume_size, 0)?;
        self.range(volume_size, self.numjobs - 1)?;
        let increment = self.round_up(self.offset_increment, volume_size);
        if self.writes_verified() && increment > 0 && increment / u64::from(self.bs) < first.blocks {
            let why = "with verify the workers' ranges may not overlap: give a `size` of at most this value";
            return Err(JobError::bad_value("offset_increment", self.offset_increment.short(), why));
        }
        Ok(())
    }

    /// The range of worker `worker` (from 0) on a volume of `volume_size` bytes.
    ///
    /// As in fio, all workers have the same range, shifted by `offset_increment` from one worker to
    /// the next. Without an increment, workers that verify their writes get separate parts of the
    /// range, because overwritten blocks of another worker would fail verification. A percentage is
    /// of the whole volume; an offset is rounded up and a size down to whole blocks. A size in per
    /// cent is cut at the volume's end; a size in bytes must fit.
    ///
    /// # Errors
    /// If the range is empty or extends beyond the end.
    pub fn range(&self, volume_size: u64, worker: u32) -> Result<Range, JobError> {
        let bs = u64::from(self.bs);
        let increment = self.round_up(self.offset_increment, volume_size);
        let offset = increment
            .checked_mul(worker.into())
            .and_then(|step| step.checked_add(self.round_up(self.offset, volume_size)))
            .filter(|&offset| offset < volume_size)
            .ok_or_else(|| {
                let why =
                    format!("worker {worker} would begin past the volume's end at {}", short(volume_size));
                let key = if increment > 0 { "offset_increment" } else { "offset" };
                let value = if increment > 0 { self.offset_increment } else { self.offset };
                JobError::bad_value(key, value.short(), why)
            })?;
        let left = volume_size - offset;
        let len = match self.size {
            None => left,
            Some(size @ Size::Percent(_)) => size.of(volume_size).min(left),
            Some(Size::Bytes(bytes)) if bytes <= left => bytes,
            Some(size) => {
                let (left, offset) = (short(left), short(offset));
                let why = format!("only {left} is left from {offset} to the volume's end");
                return Err(JobError::bad_value("size", size.short(), why));
            }
        };
        let range = Range { offset, blocks: len / bs };
        if range.blocks == 0 {
            let why = format!("the range has {len} bytes, less than one block");
            return Err(JobError::bad_value("bs", self.bs, why));
        }
        if self.writes_verified() && increment == 0 {
            return self.part(range, worker);
        }
        Ok(range)
    }

    /// Checks the limits that apply to any volume.
    pub(crate) fn check_bounds(&self) -> Result<(), JobError> {
        let bounds = [
            ("bs", u64::from(self.bs), 1, u64::from(MAX_BS)),
            ("iodepth", self.iodepth.into(), 1, MAX_IODEPTH.into()),
            ("numjobs", self.numjobs.into(), 1, MAX_NUMJOBS.into()),
            ("rwmixread", self.rwmixread.into(), 0, 100),
        ];
        for (key, value, min, max) in bounds {
            if !(min..=max).contains(&value) {
                return Err(JobError::bad_value(key, value, format!("must be from {min} to {max}")));
            }
        }
        for (key, ms, min) in [("runtime", self.runtime_ms, 1), ("ramp_time", self.ramp_time_ms, 0)] {
            if !(min..=MAX_TIME_MS).contains(&ms) {
                let why = format!("must be from {min} ms to {MAX_TIME_MS} ms");
                return Err(JobError::bad_value(key, format!("{ms}ms"), why));
            }
        }
        if matches!(self.size, Some(Size::Bytes(0) | Size::Percent(0))) {
            return Err(JobError::bad_value(
                "size",
                self.size.unwrap_or(Size::ZERO),
                "must be greater than 0",
            ));
        }
        Ok(())
    }

    fn check_verify(&self) -> Result<(), JobError> {
        let Some(verify) = self.verify else {
            return Ok(());
        };
        let name = if verify == Verify::Crc32c { "crc32c" } else { "pattern" };
        if !matches!(self.rw, Rw::Read | Rw::RandRead | Rw::Write | Rw::RandWrite) {
            let why =
                format!("rw={} cannot be verified: read, write, randread and randwrite can", self.rw.name());
            return Err(JobError::bad_value("verify", name, why));
        }
        if self.norandommap && self.rw == Rw::RandWrite {
            let why = "with norandommap a block may be written twice at the same time, so its expected content is unknown";
            return Err(JobError::bad_value("verify", name, why));
        }
        if self.bs < crate::content::MIN_BLOCK as u32 {
            let why = format!("a verified block has at least {} bytes", crate::content::MIN_BLOCK);
            return Err(JobError::bad_value("bs", self.bs, why));
        }
        Ok(())
    }

    fn writes_verified(&self) -> bool {
        self.verify.is_some() && self.rw.changes_content()
    }

    /// One worker's share of a common range; the last worker gets the remainder.
    fn part(&self, range: Range, worker: u32) -> Result<Range, JobError> {
        let (workers, worker) = (u64::from(self.numjobs), u64::from(worker));
        let each = range.blocks / workers;
        if each == 0 {
            let why = format!("with verify each worker needs its own blocks, and there are {}", range.blocks);
            return Err(JobError::bad_value("numjobs", self.numjobs, why));
        }
        let blocks = if worker + 1 == workers { range.blocks - each * worker } else { each };
        Ok(Range { offset: range.offset + each * worker * u64::from(self.bs), blocks })
    }

    /// Rounds a percentage up to a whole block, as fio does; bytes are unchanged.
    fn round_up(&self, place: Size, volume_size: u64) -> u64 {
        match place {
            Size::Bytes(bytes) => bytes,
            // The rounded offset may be past the volume's end; `range` refuses that.
            Size::Percent(_) => {
                place.of(volume_size).checked_next_multiple_of(self.bs.into()).unwrap_or(u64::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn job(options: &[(&str, &str)]) -> Job {
        let mut job = Job::default();
        for (key, value) in options {
            job.set(key, value).unwrap();
        }
        job
    }

    fn fault(options: &[(&str, &str)]) -> String {
        job(options).validate(MIB, 512).unwrap_err().to_string()
    }

    #[test]
    fn a_job_is_named_by_its_shape() {
        let shape = [("rw", "randread"), ("iodepth", "32"), ("bs", "1m")];
        assert_eq!(job(&shape).name_by_shape(), "randread-1m-qd32");
        assert_eq!(job(&[("numjobs", "4"), ("bs", "512")]).name_by_shape(), "read-512-qd1-x4");
    }

    #[test]
    fn percentages_are_rounded_to_blocks_as_in_fio() {
        // The results of fio 3.33 with a file of 1 MiB.
        for (offset, size, at, bytes) in [
            ("50%", "50%", 512 << 10, 512 << 10),
            ("75%", "50%", 768 << 10, 256 << 10),
            ("33%", "10%", 0x55000, 100 << 10),
        ] {
            let range = job(&[("offset", offset), ("size", size)]).range(MIB, 0).unwrap();
            assert_eq!(range, Range { offset: at, blocks: bytes / 4096 });
        }
    }

    #[test]
    fn workers_share_the_range_unless_an_increment_moves_them() {
        let same = job(&[("numjobs", "4")]);
        assert_eq!(same.range(MIB, 3), same.range(MIB, 0));
        let moved = job(&[("numjobs", "4"), ("offset_increment", "25%")]);
        assert_eq!(moved.range(MIB, 3), Ok(Range { offset: 768 << 10, blocks: 64 }));
        assert_eq!(moved.range(MIB, 1), Ok(Range { offset: 256 << 10, blocks: 192 }));
    }

    #[test]
    fn verifying_writers_get_separate_parts_of_the_range() {
        let job = job(&[("numjobs", "3"), ("verify", "crc32c"), ("rw", "randwrite")]);
        let ranges = [0, 1, 2].map(|worker| job.range(MIB, worker).unwrap());
        assert_eq!(ranges.map(|range| range.blocks), [85, 85, 86]);
        assert_eq!(ranges.map(|range| range.offset / 4096), [0, 85, 170]);
        let reads = Job { rw: Rw::RandRead, ..job };
        assert_eq!(reads.range(MIB, 2), Ok(Range { offset: 0, blocks: 256 }));
    }

    #[test]
    fn an_option_that_the_volume_cannot_satisfy_is_named() {
        assert_eq!(
            fault(&[("bs", "1000")]),
            "bad value `1000` for `bs`: not a multiple of the volume's block of 512 bytes"
        );
        assert!(fault(&[("bs", "2m")]).contains("less than one block"));
        assert!(fault(&[("offset", "100")]).contains("`100` for `offset`: not a multiple"));
        assert!(fault(&[("offset", "1m")]).contains("for `offset`: worker 0 would begin past"));
        assert!(fault(&[("offset", "100%")]).contains("for `offset`: worker 0 would begin past"));
        assert!(fault(&[("size", "2m")]).contains("for `size`: only 1m is left"));
        assert!(
            fault(&[("size", "1m"), ("offset", "4k")]).contains("for `size`: only 1020k is left from 4k")
        );
        assert!(
            fault(&[("numjobs", "5"), ("offset_increment", "25%")])
                .contains("for `offset_increment`: worker 4 would")
        );
        assert!(fault(&[("offset_increment", "1000")]).contains("for `offset_increment`: not a multiple"));
        assert!(fault(&[("size", "1%"), ("bs", "64k")]).contains("less than one block"));
    }

    #[test]
    fn jobs_that_cannot_be_verified_are_refused() {
        for rw in ["randrw", "rw", "trim", "randtrim"] {
            assert!(fault(&[("verify", "crc32c"), ("rw", rw)]).contains("cannot be verified"));
        }
        assert!(
            fault(&[("verify", "pattern"), ("rw", "randwrite"), ("norandommap", "1")])
                .contains("written twice")
        );
        let overlapping = [
            ("verify", "crc32c"),
            ("rw", "write"),
            ("numjobs", "2"),
            ("offset_increment", "256k"),
            ("size", "512k"),
        ];
        assert!(fault(&overlapping).contains("may not overlap"));
        let apart = [
            ("verify", "crc32c"),
            ("rw", "write"),
            ("numjobs", "2"),
            ("offset_increment", "512k"),
            ("size", "512k"),
        ];
        assert_eq!(job(&apart).validate(MIB, 512), Ok(()));
        assert!(
            fault(&[("verify", "crc32c"), ("rw", "write"), ("numjobs", "512")]).contains("for `numjobs`")
        );
        let tiny = job(&[("verify", "crc32c"), ("rw", "write"), ("bs", "16")]);
        assert!(tiny.validate(MIB, 1).unwrap_err().to_string().contains("at least"));
    }

    #[test]
    fn a_job_built_by_hand_is_checked_too() {
        let zero = Job { bs: 0, ..Job::default() };
        assert_eq!(
            zero.validate(MIB, 512).unwrap_err().to_string(),
            "bad value `0` for `bs`: must be from 1 to 33554432"
        );
        let mix = Job { rwmixread: 101, ..Job::default() };
        assert!(mix.validate(MIB, 512).is_err());
        assert_eq!(Job::default().validate(MIB, 512), Ok(()));
    }

    #[test]
    fn a_job_survives_json_with_fios_option_names() {
        let job = job(&[("rw", "rw"), ("size", "50%"), ("verify", "pattern")]);
        let json = serde_json::to_value(&job).unwrap();
        assert_eq!(
            (&json["rw"], &json["size"], &json["verify"]),
            (&"readwrite".into(), &"50%".into(), &"pattern".into())
        );
        assert_eq!(serde_json::from_value::<Job>(json).unwrap(), job);
        for rw in Rw::ALL {
            assert_eq!(serde_json::to_value(rw).unwrap(), rw.name());
        }
    }

    proptest! {
        #[test]
        fn every_worker_of_a_valid_job_stays_inside(
            blocks in 1_u64..3000, bs in 1_u32..40, numjobs in 1_u32..6, offset in 0_u64..3000,
            increment in 0_u64..1000, size in proptest::option::of(1_u64..3000), percent: bool, verify: bool,
        ) {
            let place = |blocks: u64| if percent { Size::Percent((blocks % 101) as u8) } else { Size::Bytes(blocks * 512) };
            let job = Job {
                rw: Rw::Write,
                bs: bs * 512,
                numjobs,
                offset: place(offset),
                offset_increment: place(increment),
                size: size.map(place),
                verify: verify.then_some(Verify::Crc32c),
                ..Job::default()
            };
            let volume = blocks * 512;
            if job.validate(volume, 512).is_ok() {
                let mut end = 0;
                for worker in 0..numjobs {
                    let range = job.range(volume, worker).unwrap();
                    prop_assert!(range.blocks > 0 && range.offset.is_multiple_of(512));
                    prop_assert!(range.offset + range.blocks * u64::from(job.bs) <= volume);
                    if verify {
                        prop_assert!(range.offset >= end);
                        end = range.offset + range.blocks * u64::from(job.bs);
                    }
                }
            }
        }
    }
}

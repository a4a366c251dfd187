//! fio's options by name, and errors for unknown ones.
//!
//! An option has fio's meaning, or is refused. Only some names in [`crate::job_file`], which
//! concern fio itself, are ignored.

use crate::content::Verify;
use crate::job::{Job, Rw};
pub use crate::job_error::{JobError, nearest};
use crate::units::{parse_int, parse_size, parse_time_ms};

/// The names that [`Job::set`] accepts; aliases follow their name.
pub const JOB_OPTIONS: &[&str] = &[
    "name",
    "rw",
    "readwrite",
    "bs",
    "blocksize",
    "iodepth",
    "numjobs",
    "runtime",
    "timeout",
    "ramp_time",
    "size",
    "offset",
    "fileoffset",
    "offset_increment",
    "rwmixread",
    "rwmixwrite",
    "norandommap",
    "randseed",
    "verify",
    "fsync",
    "fdatasync",
    "sync",
];

impl Job {
    /// Sets one option from its text. An option without a value, as job files permit for switches,
    /// has the value "". Aliases as in fio: `readwrite` for `rw`, `blocksize` for `bs`, `timeout`
    /// for `runtime`, `fileoffset` for `offset`;
    /// `rwmixwrite` is the complement of `rwmixread`; `fdatasync` is `fsync`, because a volume has
    /// only one kind of flush; `sync` makes every write FUA.
    ///
    /// # Errors
    /// If the name is unknown, or the value is of the wrong type or out of bounds. The job is then
    /// unchanged.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), JobError> {
        let known = JOB_OPTIONS.iter().find(|&&known| known == key);
        let &key = known.ok_or_else(|| JobError::unknown(key, &[JOB_OPTIONS]))?;
        let mut changed = self.clone();
        changed.assign(key, value.trim()).map_err(|why| JobError::bad_value(key, value, why))?;
        changed.check_bounds()?;
        *self = changed;
        Ok(())
    }

    fn assign(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "name" if value.is_empty() => return Err("a job's name is not empty".into()),
            "name" => value.clone_into(&mut self.name),
            // fio has lists of block sizes only.
            key if value.contains(',') && !["bs", "blocksize"].contains(&key) => {
                return Err("a job has one value; write one [section] of a job file for each".into());
            }
            "rw" | "readwrite" => self.rw = parse_rw(value)?,
            "bs" | "blocksize" => self.bs = parse_one_bs(value)?,
            "iodepth" => self.iodepth = parse_u32(value)?,
            "numjobs" => self.numjobs = parse_u32(value)?,
            "runtime" | "timeout" => self.runtime_ms = parse_time_ms(value)?,
            "ramp_time" => self.ramp_time_ms = parse_time_ms(value)?,
            "size" => self.size = Some(parse_size(value)?),
            "offset" | "fileoffset" => self.offset = parse_size(value)?,
            "offset_increment" => self.offset_increment = parse_size(value)?,
            "rwmixread" => self.rwmixread = parse_percent(value)?,
            "rwmixwrite" => self.rwmixread = 100 - parse_percent(value)?,
            "norandommap" => self.norandommap = parse_switch(value)?,
            "randseed" => self.randseed = parse_int(value)?,
            "verify" => self.verify = parse_verify(value)?,
            "fsync" | "fdatasync" => self.fsync_every = parse_u32(value)?,
            _ => self.fua_every = parse_sync(value)?,
        }
        Ok(())
    }
}

/// A switch as in fio: the name alone, or 0 or 1.
pub(crate) fn parse_switch(value: &str) -> Result<bool, String> {
    match value {
        "" | "1" => Ok(true),
        "0" => Ok(false),
        _ => Err("a switch is 0 or 1".into()),
    }
}

fn parse_rw(value: &str) -> Result<Rw, String> {
    let found = Rw::ALL.into_iter().find(|rw| rw.name() == value);
    // fio accepts both spellings.
    let found = found.or((value == "rw").then_some(Rw::ReadWrite));
    found.ok_or_else(|| format!("patterns are {} (or rw)", Rw::ALL.map(Rw::name).join(" ")))
}

fn parse_one_bs(value: &str) -> Result<u32, String> {
    if value.contains([',', '-', ':']) {
        return Err("give one block size; ranges and separate sizes for writes are not supported".into());
    }
    parse_u32(value)
}

fn parse_verify(value: &str) -> Result<Option<Verify>, String> {
    match value {
        "0" => Ok(None),
        // fio uses the CPU's CRC instructions by itself, and keeps the old name.
        "crc32c" | "crc32c-intel" => Ok(Some(Verify::Crc32c)),
        "pattern" => Ok(Some(Verify::Pattern)),
        _ => Err("give crc32c or pattern, or 0 for no verification".into()),
    }
}

fn parse_sync(value: &str) -> Result<u32, String> {
    match value {
        "0" | "none" => Ok(0),
        "1" | "sync" | "dsync" => Ok(1),
        _ => Err("one of none, sync, dsync, 0, 1".into()),
    }
}

fn parse_u32(value: &str) -> Result<u32, String> {
    u32::try_from(parse_int(value)?).map_err(|_| "too large".into())
}

fn parse_percent(value: &str) -> Result<u8, String> {
    match u8::try_from(parse_int(value)?) {
        Ok(percent @ 0..=100) => Ok(percent),
        _ => Err("a percentage from 0 to 100".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Size;

    #[test]
    fn every_option_sets_its_field() {
        let mut job = Job::default();
        for (key, value) in [
            ("name", "j"),
            ("rw", "randrw"),
            ("bs", "64k"),
            ("iodepth", "32"),
            ("numjobs", "4"),
            ("runtime", "1500ms"),
            ("ramp_time", "1"),
            ("size", "50%"),
            ("offset", "1m"),
            ("offset_increment", "25%"),
            ("rwmixread", "70"),
            ("norandommap", ""),
            ("randseed", "0x10"),
            ("verify", "crc32c"),
            ("fsync", "8"),
            ("sync", "dsync"),
        ] {
            job.set(key, value).unwrap();
        }
        let expected = Job {
            name: "j".into(),
            rw: Rw::RandRw,
            bs: 65536,
            iodepth: 32,
            numjobs: 4,
            runtime_ms: 1500,
            ramp_time_ms: 1000,
            size: Some(Size::Percent(50)),
            offset: Size::Bytes(1 << 20),
            offset_increment: Size::Percent(25),
            rwmixread: 70,
            norandommap: true,
            randseed: 16,
            verify: Some(Verify::Crc32c),
            fsync_every: 8,
            fua_every: 1,
            program: None,
        };
        assert_eq!(job, expected);
    }

    #[test]
    fn aliases_set_what_their_name_sets() {
        let (mut by_name, mut by_alias) = (Job::default(), Job::default());
        let pairs = [
            (("rw", "readwrite"), ("readwrite", "rw")),
            (("bs", "8k"), ("blocksize", "8k")),
            (("rwmixread", "30"), ("rwmixwrite", "70")),
            (("fsync", "5"), ("fdatasync", "5")),
            (("runtime", "5"), ("timeout", "5")),
            (("offset", "1m"), ("fileoffset", "1m")),
            (("verify", "crc32c"), ("verify", "crc32c-intel")),
        ];
        for (name, alias) in pairs {
            by_name.set(name.0, name.1).unwrap();
            by_alias.set(alias.0, alias.1).unwrap();
            assert_ne!(by_name, Job::default());
            assert_eq!(by_name, by_alias);
        }
    }

    #[test]
    fn every_listed_option_is_known() {
        for key in JOB_OPTIONS {
            let bad = Job::default().set(key, "\u{fffd}");
            assert!(*key == "name" || matches!(bad, Err(JobError::BadValue { .. })), "{key}: {bad:?}");
        }
    }

    #[test]
    fn an_unknown_option_is_named_with_its_nearest() {
        let error = |key| Job::default().set(key, "1").unwrap_err().to_string();
        let text = error("foo");
        assert!(text.starts_with("unknown fio option `foo`; known are name rw "), "{text}");
        for (typo, meant) in [
            ("iodpeth", "iodepth"),
            ("io_depth", "iodepth"),
            ("BS", "bs"),
            ("rampt_ime", "ramp_time"),
            ("fsnyc", "fsync"),
        ] {
            let text = error(typo);
            assert_eq!(text, format!("unknown fio option `{typo}`, did you mean `{meant}`?"));
        }
    }

    #[test]
    fn a_bad_value_is_named_and_changes_nothing() {
        for (key, value) in [
            ("rw", "randread:8"),
            ("rw", "READ"),
            ("bs", "0"),
            ("bs", "4k,8k"),
            ("bs", "64m"),
            ("bs", "5g"),
            ("iodepth", "0"),
            ("iodepth", "4097"),
            ("numjobs", "0"),
            ("numjobs", "1025"),
            ("runtime", "0"),
            ("runtime", "1000d"),
            ("ramp_time", "1000d"),
            ("rwmixread", "101"),
            ("rwmixwrite", "300"),
            ("verify", "md5"),
            ("sync", "yes"),
            ("norandommap", "2"),
            ("size", "0"),
            ("size", "0%"),
            ("size", ""),
            ("name", ""),
        ] {
            let mut job = Job::default();
            let text = job.set(key, value).unwrap_err().to_string();
            assert!(text.starts_with("bad value `") && text.contains(&format!("for `{key}`: ")), "{text}");
            assert!(!text.contains('\n'));
            assert_eq!(job, Job::default(), "{key}={value}");
        }
    }
}

//! What bonnie++ measures of a file system, read from the line that it prints.
//!
//! The line has comma-separated values (`bon_csv2txt(1)`). A value is empty if its test did not
//! run, and consists of plus signs if the test took too little time for bonnie++ to state a rate.

use crate::job::{Job, Rw};
use crate::result::{Direction, Run};

/// Rates of one run of bonnie++ in KiB/s; `None` if a test took too little time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BonnieRates {
    write: Option<u64>,
    rewrite: Option<u64>,
    read: Option<u64>,
}

impl BonnieRates {
    /// Reads the last line of the program's standard output.
    ///
    /// # Errors
    /// If it is not in a known format; the error says why.
    pub fn parse(output: &str) -> Result<BonnieRates, String> {
        let line = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let values: Vec<&str> = line.trim().split(',').collect();
        let [format, _, ..] = values[..] else { return Err("it printed no values".to_owned()) };
        if !FORMATS.contains(&format) {
            return Err(format!("its output has format `{format}`; known are {}", FORMATS.join(" ")));
        }
        let rate = |at: usize| match values.get(at) {
            Some(value) if !value.is_empty() && value.chars().all(|c| c == '+') => Ok(None),
            Some(value) => match value.parse::<u64>() {
                Ok(rate) if rate > 0 => Ok(Some(rate)),
                _ => Err(format!("value {at} of its output is `{value}`, not a rate")),
            },
            None => Err(format!("its output has only {} values", values.len())),
        };
        Ok(BonnieRates { write: rate(WRITE)?, rewrite: rate(REWRITE)?, read: rate(READ)? })
    }

    /// The run of a job over `bytes` of data; `None` if it took too little time. A rewrite counts
    /// the data once, as bonnie++ does.
    #[must_use]
    pub fn run(&self, job: &Job, bytes: u64) -> Option<Run> {
        let kib_per_s = match job.rw {
            Rw::Read | Rw::RandRead => self.read,
            Rw::Write | Rw::RandWrite => self.write,
            _ => self.rewrite,
        }?;
        let moved = Direction { ios: bytes / u64::from(job.bs.max(1)), bytes, ..Direction::default() };
        let runtime_ns = u128::from(bytes) * 1_000_000_000 / (u128::from(kib_per_s) * 1024);
        let mut run = Run { runtime_ns: u64::try_from(runtime_ns).unwrap_or(u64::MAX), ..Run::default() };
        *match job.rw {
            Rw::Read | Rw::RandRead => &mut run.read,
            Rw::Write | Rw::RandWrite => &mut run.write,
            _ => &mut run.mixed,
        } = moved;
        Some(run)
    }
}

/// Formats whose values are in the places below.
const FORMATS: [&str; 2] = ["1.97", "1.98"];
const WRITE: usize = 11;
const REWRITE: usize = 13;
const READ: usize = 17;

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of bonnie++ 2.00a with `-f -s 256 -n 0`, of which the read was too short.
    const LINE: &str = "1.98,2.00a,cell,1,1795944613,256M,,8192,5,,,348461,25,427200,28,,,+++++,+++,+++++,+++,,,,,,\
        ,,,,,,,,,,,,,4786us,7972us,,9545us,50605us,,,,,,\n";

    fn job(rw: Rw) -> Job {
        Job { rw, bs: 8192, ..Job::default() }
    }

    #[test]
    fn rates_are_read_from_the_line_of_the_program() {
        let rates = BonnieRates::parse(&format!("Writing intelligently...done\n{LINE}\n")).unwrap();
        assert_eq!(rates, BonnieRates { write: Some(348_461), rewrite: Some(427_200), read: None });
        let run = rates.run(&job(Rw::Write), 256 << 20).unwrap();
        assert_eq!((run.write.bytes, run.write.ios), (256 << 20, 32_768));
        assert!((run.bytes_per_second() / 1024.0 - 348_461.0).abs() < 0.01);
        assert_eq!(rates.run(&job(Rw::ReadWrite), 256 << 20).unwrap().mixed.bytes, 256 << 20);
        assert_eq!(rates.run(&job(Rw::Read), 256 << 20), None, "it took too little time");
    }

    #[test]
    fn other_output_is_an_error_that_says_why() {
        let said = |output: &str| BonnieRates::parse(output).unwrap_err();
        assert_eq!(said(""), "it printed no values");
        assert_eq!(said("3.0,4,5"), "its output has format `3.0`; known are 1.97 1.98");
        assert_eq!(said("1.98,2.00a,cell"), "its output has only 3 values");
        assert_eq!(said(&LINE.replace("427200", "0")), "value 13 of its output is `0`, not a rate");
        assert_eq!(said(&LINE.replace("348461", "")), "value 11 of its output is ``, not a rate");
    }
}

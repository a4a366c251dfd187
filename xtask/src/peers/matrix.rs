//! The cells of a comparison: pattern, block size, depth and number of connections.

use anyhow::{Result, bail};

/// The access patterns of fio's `rw` that are measured here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rw {
    Read,
    Write,
    RandRead,
    RandWrite,
}

/// A combination of options to measure on every server with every client. They have fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) rw: Rw,
    /// Block size in bytes.
    pub(crate) bs: u32,
    /// I/O in flight on each connection.
    pub(crate) iodepth: u32,
    /// Number of connections.
    pub(crate) numjobs: u32,
}

/// Which cells to measure; an empty list selects all.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    pub(crate) bs: Vec<u32>,
    pub(crate) iodepth: Vec<u32>,
    pub(crate) numjobs: Vec<u32>,
}

impl Rw {
    /// fio's name of the pattern.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
        }
    }

    /// The pattern in words, for headings.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Rw::Read => "sequential read",
            Rw::Write => "sequential write",
            Rw::RandRead => "random read",
            Rw::RandWrite => "random write",
        }
    }

    pub(crate) fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite)
    }

    pub(crate) fn is_write(self) -> bool {
        matches!(self, Rw::Write | Rw::RandWrite)
    }
}

impl Cell {
    pub(crate) const fn new(rw: Rw, bs: u32, iodepth: u32, numjobs: u32) -> Cell {
        Cell { rw, bs, iodepth, numjobs }
    }

    /// Short name, such as `4k randread qd32 x4`.
    pub(crate) fn short(&self) -> String {
        let connections = if self.numjobs > 1 { format!(" x{}", self.numjobs) } else { String::new() };
        format!("{} {} qd{}{connections}", fio_size(self.bs), self.rw.name(), self.iodepth)
    }

    /// Heading, such as `4 KiB random read, depth 32 x 4`.
    pub(crate) fn title(&self) -> String {
        let connections = if self.numjobs > 1 { format!(" x {}", self.numjobs) } else { String::new() };
        format!("{} {}, depth {}{connections}", human_size(self.bs), self.rw.words(), self.iodepth)
    }
}

impl Filter {
    /// The selected cells, in their order.
    ///
    /// # Errors
    /// If there are none.
    pub(crate) fn of(&self, cells: Vec<Cell>) -> Result<Vec<Cell>> {
        let keeps = |wanted: &[u32], value| wanted.is_empty() || wanted.contains(&value);
        let kept: Vec<Cell> = cells
            .into_iter()
            .filter(|cell| keeps(&self.bs, cell.bs))
            .filter(|cell| keeps(&self.iodepth, cell.iodepth))
            .filter(|cell| keeps(&self.numjobs, cell.numjobs))
            .collect();
        if kept.is_empty() {
            bail!("no cell of the matrix has these --bs, --iodepth and --numjobs; omit one of them");
        }
        Ok(kept)
    }
}

/// The cells to measure: few or all.
pub(crate) fn cells(is_quick: bool) -> Vec<Cell> {
    if is_quick { quick() } else { whole() }
}

/// Every cell of the comparison.
pub(crate) fn whole() -> Vec<Cell> {
    let small = [1, 4].into_iter().flat_map(|numjobs| {
        [1, 32, 128].into_iter().flat_map(move |iodepth| {
            [Rw::RandRead, Rw::RandWrite].map(|rw| Cell::new(rw, 4 << 10, iodepth, numjobs))
        })
    });
    let medium = [Rw::RandRead, Rw::RandWrite].map(|rw| Cell::new(rw, 64 << 10, 32, 1));
    let large = [Rw::Read, Rw::Write].map(|rw| Cell::new(rw, 1 << 20, 8, 1));
    small.chain(medium).chain(large).collect()
}

/// Every cell of 4 KiB at depth 32, which most goals refer to.
pub(crate) fn deep() -> Vec<Cell> {
    whole().into_iter().filter(|cell| (cell.bs, cell.iodepth) == (4 << 10, 32)).collect()
}

/// Few cells, including those that most goals refer to.
pub(crate) fn quick() -> Vec<Cell> {
    vec![
        Cell::new(Rw::RandRead, 4 << 10, 1, 1),
        Cell::new(Rw::RandRead, 4 << 10, 32, 1),
        Cell::new(Rw::RandWrite, 4 << 10, 32, 1),
        Cell::new(Rw::Read, 1 << 20, 8, 1),
    ]
}

/// A block size as fio takes it: `4k`, `1m`.
pub(crate) fn fio_size(bytes: u32) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{}m", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{}k", bytes >> 10),
        bytes => bytes.to_string(),
    }
}

/// Reads `4k`, `1m` or bytes; for the command line.
pub(crate) fn parse_size(text: &str) -> Result<u32, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.strip_suffix(['k', 'm']) {
        Some(digits) if lower.ends_with('k') => (digits, 10),
        Some(digits) => (digits, 20),
        None => (lower.as_str(), 0),
    };
    let number = digits.parse::<u32>().ok().and_then(|number| number.checked_mul(1 << shift));
    number.ok_or_else(|| "write a size such as 4k, 64k or 1m".to_owned())
}

fn human_size(bytes: u32) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cell_comes_twice_and_the_quick_ones_are_among_all() {
        let whole = whole();
        assert_eq!(whole.len(), 16);
        assert!(whole.iter().enumerate().all(|(at, cell)| !whole[..at].contains(cell)));
        assert!(quick().iter().all(|cell| whole.contains(cell)));
    }

    #[test]
    fn a_filter_selects_the_named_cells() {
        let filter = Filter { bs: vec![4096], iodepth: vec![1, 32], numjobs: vec![1] };
        let kept = filter.of(whole()).unwrap();
        assert_eq!(kept.len(), 4);
        assert_eq!(kept[0].title(), "4 KiB random read, depth 1");
        assert_eq!(Cell { numjobs: 4, ..kept[0] }.short(), "4k randread qd1 x4");
        assert_eq!(Filter::default().of(whole()).unwrap(), whole());
        assert!(Filter { bs: vec![512], ..filter }.of(whole()).is_err());
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [("4k", 4096), ("64K", 65536), ("1m", 1 << 20), ("512", 512)] {
            assert_eq!(parse_size(text), Ok(bytes));
            assert_eq!(fio_size(bytes), text.to_lowercase());
        }
        assert!(["", "k", "4g", "4 k", "5000m"].iter().all(|text| parse_size(text).is_err()));
    }
}

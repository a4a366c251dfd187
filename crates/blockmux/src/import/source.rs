//! The text of a foreign config.

use crate::failure::Failure;
use crate::process::regular;
use blockmux_volume::units::human_size;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// A foreign config with its name.
pub(super) struct SourceText {
    path: PathBuf,
    text: Zeroizing<String>,
}

impl SourceText {
    /// Reads a regular file, or standard input for `-`.
    ///
    /// # Errors
    /// If it cannot be read, is too long, or is no text.
    pub(super) fn read(path: &Path) -> Result<SourceText, Failure> {
        match path == Path::new(STDIN) {
            true => SourceText::of_reader(path, Ok(std::io::stdin().lock())),
            false => SourceText::of_file(path),
        }
    }

    /// Reads a regular file.
    ///
    /// # Errors
    /// If it cannot be read, is too long, or is no text.
    pub(super) fn of_file(path: &Path) -> Result<SourceText, Failure> {
        SourceText::of_reader(path, regular::open(path))
    }

    fn of_reader(path: &Path, reader: io::Result<impl Read>) -> Result<SourceText, Failure> {
        let name = path.display();
        let mut bytes = Zeroizing::new(Vec::new());
        reader
            .and_then(|reader| reader.take(MAX_LEN + 1).read_to_end(&mut bytes))
            .map_err(|error| Failure::request(format!("{name}: cannot read it: {error}; check its path")))?;
        if bytes.len() as u64 > MAX_LEN {
            let what = format!("{name}: is longer than {}; divide it", human_size(MAX_LEN));
            return Err(Failure::request(what));
        }
        SourceText::of_bytes(path, &bytes)
    }

    /// The text of these bytes.
    ///
    /// # Errors
    /// If they are not UTF-8.
    pub(super) fn of_bytes(path: &Path, bytes: &[u8]) -> Result<SourceText, Failure> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let before = bytes.get(..error.valid_up_to()).unwrap_or_default();
            let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
            Failure::request(format!("{}:{line}: is not UTF-8; give a text file", path.display()))
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Ok(SourceText { path: path.to_owned(), text: Zeroizing::new(text.to_owned()) })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error in a line, counted from 1.
    pub(super) fn wrong(&self, line: usize, what: &str) -> Failure {
        Failure::request(format!("{}:{line}: {what}", self.path.display()))
    }
}

/// Standard input, as an argument.
const STDIN: &str = "-";
/// Maximum length, in bytes: thousands of targets.
const MAX_LEN: u64 = 16 << 20;

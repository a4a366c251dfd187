//! Output of measurements: a table or JSON on standard output, and a report of two files.

use crate::failure::Failure;
use crate::output::may_colour;
use crate::process::stdout;
use blockmux_engine::sys::safe_path;
use blockmux_lab::result::Comparison;
use blockmux_lab::suite::{Study, Suite};
use blockmux_lab::{fio_json, page, table};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Creates the report's directory. Called before the measurement, so that an error costs no
/// minutes.
///
/// # Errors
/// If the directory cannot be created, or has a report already.
pub(crate) fn make_directory(report: &Path) -> Result<(), Failure> {
    let dir = report.display();
    std::fs::create_dir_all(report).map_err(|error| {
        Failure::request(format!("--report {dir}: cannot create this directory: {error}; give another one"))
    })?;
    if has_report(report) {
        return Err(Failure::request(format!(
            "--report {dir}: has a report already; move it, or give another directory"
        )));
    }
    Ok(())
}

/// Creates the directory of a report for which the user has named none: the first of
/// `bench-results`, `bench-results-2` and so on that has no report, and that no other measurement
/// has locked. It is locked until the file is closed.
///
/// # Errors
/// If the directory cannot be created or locked.
pub(crate) fn make_usual_directory() -> Result<(PathBuf, File), Failure> {
    let numbered = (2_u64..).map(|number| PathBuf::from(format!("{USUAL_DIRECTORY}-{number}")));
    for directory in std::iter::once(PathBuf::from(USUAL_DIRECTORY)).chain(numbered) {
        if has_report(&directory) {
            continue;
        }
        make_directory(&directory)?;
        let failed = |error: std::io::Error| Failure::run(format!("{}: {error}", directory.display()));
        let opened = File::open(&directory).map_err(failed)?;
        match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            // The other one may have ended in between.
            Ok(()) if !has_report(&directory) => return Ok((directory, opened)),
            Ok(()) | Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(failed(error.into())),
        }
    }
    Err(Failure::run("there is no number left for a report".to_owned()))
}

fn has_report(directory: &Path) -> bool {
    [JSON, PAGE].iter().any(|name| directory.join(name).symlink_metadata().is_ok())
}

/// Writes the report, if requested, and prints JSON, or the table with the paths of the report.
///
/// # Errors
/// If the report or the output cannot be written.
pub(crate) fn show(comparison: &Comparison, report: Option<&Path>, as_json: bool) -> Result<(), Failure> {
    let json = fio_json::to_json(comparison);
    let study = study(comparison);
    let files = report.map(|dir| write_report(dir, comparison, study.as_ref(), &json)).transpose();
    // The result is printed even if the report cannot be written.
    if as_json {
        stdout::print(json)?;
    } else {
        stdout::print(table::render(comparison, study.as_ref(), width(), colour()))?;
    }
    match files? {
        Some((json, page)) if !as_json => {
            stdout::print(format_args!("{}\n{}", json.display(), page.display()))
        }
        _ => Ok(()),
    }
}

/// The study of a comparison's suite.
fn study(comparison: &Comparison) -> Option<Study> {
    // A report of a later version may have another suite.
    let suite = Suite::by_name(comparison.suite.as_deref()?).ok()?;
    let is_on_file_system = comparison.rows.iter().any(|row| row.job.program.is_some());
    let suite = if is_on_file_system { suite.on_file_system()? } else { suite };
    Some(suite.to_study())
}

/// Writes both files; returns their paths.
fn write_report(
    dir: &Path,
    comparison: &Comparison,
    study: Option<&Study>,
    json: &str,
) -> Result<(PathBuf, PathBuf), Failure> {
    let page = page::render(comparison, study).map_err(Failure::run)?;
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        // Another measurement may have ended in the same directory meanwhile.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        safe_path::open(&path, flags, Mode::from_raw_mode(0o666))
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| Failure::run(format!("{}: cannot write the report: {error}", path.display())))?;
        Ok::<_, Failure>(path)
    };
    Ok((write(JSON, json)?, write(PAGE, &page)?))
}

/// Width of the terminal in columns; 80 without a terminal.
fn width() -> table::Width {
    let columns = console_columns().filter(|&columns| columns >= 40).unwrap_or(80);
    table::Width(columns.min(120))
}

/// Colours on a terminal, none otherwise.
fn colour() -> table::Colour {
    let wanted = std::io::stdout().is_terminal() && may_colour();
    if wanted { table::Colour::Ansi } else { table::Colour::Off }
}

fn console_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(size.ws_col.into())
}

/// Names of a report's files.
const JSON: &str = "bench.json";
const PAGE: &str = "bench.html";
/// The directory of the first report for which no other one is named.
const USUAL_DIRECTORY: &str = "bench-results";

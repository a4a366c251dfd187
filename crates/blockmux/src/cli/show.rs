//! Output of measurements: a table or JSON on standard output, and a report of two files.

use crate::failure::Failure;
use crate::output::may_colour;
use crate::process::stdout;
use blockmux_engine::sys::safe_path;
use blockmux_lab::result::Comparison;
use blockmux_lab::suite::{Study, Suite};
use blockmux_lab::{fio_json, page, table};
use rustix::fs::{Mode, OFlags};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Creates the report's directory. Called before the measurement, so that an error costs no
/// minutes.
///
/// # Errors
/// If the directory cannot be created.
pub(crate) fn make_directory(report: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(report).map_err(|error| {
        let dir = report.display();
        Failure::request(format!("--report {dir}: cannot create this directory: {error}; give another one"))
    })
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
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        safe_path::open(&path, flags, Mode::from_raw_mode(0o666))
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| Failure::run(format!("{}: cannot write the report: {error}", path.display())))?;
        Ok::<_, Failure>(path)
    };
    Ok((write("bench.json", json)?, write("bench.html", &page)?))
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
